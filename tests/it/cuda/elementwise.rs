//! Operations on rows and single values.
