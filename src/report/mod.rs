//! One result type, many forms.
