use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::HubError;

/// Where models come from and where they are kept.
#[derive(Clone)]
pub struct HubOptions {
    /// Branch, tag or commit; `main` when not given.
    pub revision: Option<String>,
    /// The hub's address.
    pub endpoint: String,
    /// The Hugging Face folder (`HF_HOME`); models are kept in `hub` inside it.
    pub home: PathBuf,
    /// Another folder for the models (`HF_HUB_CACHE`).
    pub cache: Option<PathBuf>,
    /// Access token; never part of any message.
    pub token: Option<String>,
    /// Use only what the cache holds.
    pub offline: bool,
    /// How often in a row a broken transfer is taken up again without any new byte.
    pub retries: u32,
    /// The pause before the first retry; it doubles each time, up to ten seconds.
    pub backoff: Duration,
    /// How long to wait for another process that downloads the same model.
    pub lock_wait: Duration,
}

impl HubOptions {
    /// The public hub, `main`, no token.
    pub fn new(home: impl Into<PathBuf>) -> Self {
        Self {
            revision: None,
            endpoint: "https://huggingface.co".into(),
            home: home.into(),
            cache: None,
            token: None,
            offline: false,
            retries: 4,
            backoff: Duration::from_millis(300),
            lock_wait: Duration::from_secs(5),
        }
    }

    /// What the environment says: `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` (or the file
    /// `token` in `HF_HOME`), `HF_HUB_OFFLINE`.
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// [`Self::from_env`] with variables from elsewhere.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        // A variable that is set to nothing counts as unset.
        let folder = |name: &str| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let text = |name: &str| {
            let value = variable(name)?.into_string().ok()?;
            Some(value.trim().to_string()).filter(|v| !v.is_empty())
        };
        let home = folder("HF_HOME")
            .or_else(|| folder("XDG_CACHE_HOME").map(|dir| dir.join("huggingface")))
            .or_else(|| folder("HOME").or_else(home_dir).map(|dir| dir.join(".cache/huggingface")))
            .ok_or(HubError::NoHome)?;
        let token_file = || {
            let token = std::fs::read_to_string(home.join("token")).ok()?;
            Some(token.trim().to_string()).filter(|t| !t.is_empty())
        };
        let offline = text("HF_HUB_OFFLINE").is_some_and(|v| matches!(&*v.to_lowercase(), "1" | "true" | "yes" | "on"));
        let mut options = Self::new(home.clone());
        options.endpoint = text("HF_ENDPOINT").unwrap_or(options.endpoint);
        options.cache = folder("HF_HUB_CACHE");
        options.token = text("HF_TOKEN").or_else(token_file);
        options.offline = offline;
        Ok(options)
    }

    /// The folder that holds the models.
    pub fn cache_dir(&self) -> PathBuf {
        self.cache.clone().unwrap_or_else(|| self.home.join("hub"))
    }

    pub(super) fn secret(&self) -> Option<&str> {
        self.token.as_deref().map(str::trim).filter(|t| !t.is_empty())
    }

    /// The address without a trailing slash, if it is one.
    pub(super) fn address(&self) -> Result<&str, HubError> {
        let address = self.endpoint.trim_end_matches('/');
        let host = address.strip_prefix("https://").or_else(|| address.strip_prefix("http://"));
        match host {
            Some(host) if !host.is_empty() && host.chars().all(|c| c.is_ascii_graphic()) => Ok(address),
            _ => Err(HubError::BadEndpoint { endpoint: self.shown_endpoint() }),
        }
    }

    /// The address as messages may show it: without `user:password@`.
    pub(super) fn shown_endpoint(&self) -> String {
        let address = self.endpoint.trim_end_matches('/');
        let (scheme, rest) = address.split_once("://").map_or(("", address), |(s, r)| (s, r));
        let (authority, path) = rest.split_once('/').map_or((rest, None), |(a, p)| (a, Some(p)));
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let scheme = if scheme.is_empty() { String::new() } else { format!("{scheme}://") };
        path.map_or_else(|| format!("{scheme}{host}"), |path| format!("{scheme}{host}/{path}"))
    }
}

/// The home folder by other means than a variable that may be set to nothing.
fn home_dir() -> Option<PathBuf> {
    std::env::home_dir().filter(|dir| !dir.as_os_str().is_empty())
}

impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("revision", &self.revision)
            .field("endpoint", &self.shown_endpoint())
            .field("home", &self.home)
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "(hidden)"))
            .field("offline", &self.offline)
            .field("retries", &self.retries)
            .field("backoff", &self.backoff)
            .field("lock_wait", &self.lock_wait)
            .finish()
    }
}
