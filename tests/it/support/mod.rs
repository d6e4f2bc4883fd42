//! What several tests share.
pub mod hub_server;
