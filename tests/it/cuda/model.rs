//! Whole models: logits, text, artifacts, several devices, weights that do not fit.
