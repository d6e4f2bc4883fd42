//! Attention over rows and over paged caches.
