//! Models by hub id.
