use std::path::PathBuf;

use thiserror::Error;

/// Why a model could not be had.
#[derive(Debug, Error)]
pub enum HubError {
    #[error("`{id}` is no hub id; an id is `org/name`, in letters, digits, `-`, `_` and `.`")]
    BadId { id: String },
    #[error("`{revision}` is no revision; give a branch, a tag or a commit")]
    BadRevision { revision: String },
    #[error("`{endpoint}` is no hub address; HF_ENDPOINT must begin with https:// or http://")]
    BadEndpoint { endpoint: String },
    #[error("the token has characters that no token has; set HF_TOKEN again")]
    BadToken,
    #[error("no home folder is known for the model cache; set HF_HOME")]
    NoHome,
    #[error("`{endpoint}` knows no model `{id}` with revision `{revision}`; check both")]
    NotFound { id: String, revision: String, endpoint: String },
    #[error(
        "`{id}` is gated, private or unknown at `{endpoint}`; check the name, accept its licence at `{endpoint}/{id}` and set HF_TOKEN"
    )]
    NeedsToken { id: String, endpoint: String },
    #[error(
        "`{endpoint}` refused the token for `{id}`; check the name, or make a new token and set HF_TOKEN (or the file `token` in HF_HOME)"
    )]
    TokenRefused { id: String, endpoint: String },
    #[error(
        "access to `{id}` is not granted; accept its licence at `{endpoint}/{id}` and set HF_TOKEN to a token of that account"
    )]
    Gated { id: String, endpoint: String },
    #[error(
        "`{file}` of `{id}` (revision `{revision}`) is not in the cache `{cache}` and HF_HUB_OFFLINE is set; unset it to download the model"
    )]
    Offline { id: String, revision: String, file: String, cache: PathBuf },
    #[error("`{id}` (revision `{revision}`) has no `config.json`, so it is no model that can be read here")]
    NoConfig { id: String, revision: String, files: Vec<String> },
    #[error("`{id}` holds no safetensors weights{hint}")]
    NoWeights { id: String, hint: &'static str, files: Vec<String> },
    #[error("`{id}` lists the file `{name}`, which lies outside the model folder; nothing was downloaded")]
    NameOutside { id: String, name: String },
    #[error("the index of `{id}` names shard `{shard}`, which is no safetensors file inside the model folder")]
    ShardOutside { id: String, shard: String },
    #[error("the index of `{id}` names shard `{shard}`, which the repository does not hold")]
    ShardMissing { id: String, shard: String },
    #[error("`model.safetensors.index.json` of `{id}` is not valid: {why}")]
    Index { id: String, why: String },
    #[error(
        "cannot download `{file}` of `{id}` from `{endpoint}`: {why}; run again to go on where it stopped, or set HF_HUB_OFFLINE=1 to use the cache alone"
    )]
    Network { id: String, file: String, endpoint: String, why: String },
    #[error("`{endpoint}` gave an answer about `{file}` of `{id}` that cannot be used: {why}")]
    Answer { id: String, file: String, endpoint: String, why: String },
    #[error("`{file}` of `{id}` came with {found} bytes instead of {wanted}; it was deleted, run again")]
    Size { id: String, file: String, found: u64, wanted: u64 },
    #[error("`{file}` of `{id}` came damaged (SHA-256 {found}, the hub says {wanted}); it was deleted, run again")]
    Hash { id: String, file: String, found: String, wanted: String },
    #[error("another quantkit is downloading `{id}`; wait for it and run again")]
    Busy { id: String },
    #[error("cannot write `{path}`: {why}")]
    Io { path: PathBuf, why: String },
}

impl HubError {
    /// The files of a repository that is not a model in Hugging Face's layout.
    pub fn listing(&self) -> Option<&[String]> {
        match self {
            HubError::NoConfig { files, .. } | HubError::NoWeights { files, .. } => Some(files),
            _ => None,
        }
    }
}
