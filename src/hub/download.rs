//! One file from the hub into the cache, through `hf-hub` and with the guards it lacks.

use std::fs::File;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use sha2::{Digest, Sha256};

use super::cache::{self, Store};
use super::select;
use super::{Events, HubError, HubEvent, HubOptions};
use crate::num::hex::hex;

/// Git's name for the empty file.
const EMPTY_BLOB: &str = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391";
const SLOWEST: Duration = Duration::from_secs(10);

/// A model on the hub at a fixed commit, and its place in the cache.
pub struct Remote<'a> {
    id: &'a str,
    revision: &'a str,
    options: &'a HubOptions,
    store: &'a Store,
    api: Api,
    repo: ApiRepo,
    commit: String,
    lock: Option<File>,
}

/// What the hub says about a file.
struct Probe {
    etag: String,
    key: String,
    size: u64,
}

impl Probe {
    /// The hash of the content, which is the etag of large files.
    fn sha256(&self) -> Option<String> {
        let hash = self.key.len() == 64 && self.key.chars().all(|c| c.is_ascii_hexdigit());
        hash.then(|| self.key.to_ascii_lowercase())
    }
}

/// Why one request failed, before a person is told.
enum Failure {
    Final(HubError),
    Status(u16),
    /// The connection, or something on the way: worth another try.
    Broken(String),
    /// The part on disk is longer than the file.
    Overlong,
    Locked,
    Disk(String),
    Nonsense(String),
}

impl<'a> Remote<'a> {
    /// Asks which commit the revision stands at and which files it has.
    pub fn open(
        id: &'a str,
        revision: &'a str,
        options: &'a HubOptions,
        store: &'a Store,
    ) -> Result<(Self, Vec<String>), HubError> {
        let token = options.secret();
        if token.is_some_and(|t| !t.chars().all(|c| c.is_ascii_graphic())) {
            return Err(HubError::BadToken);
        }
        let api = ApiBuilder::from_cache(Cache::new(store.staging()))
            .with_endpoint(options.address()?.into())
            .with_token(token.map(str::to_string))
            // Retries are made here: those of `hf-hub` may go on from the wrong place in the file.
            .with_retries(0)
            .with_progress(false)
            .with_user_agent("quantkit", env!("CARGO_PKG_VERSION"))
            .build();
        let repo = |api: &Api, at: &str| api.repo(Repo::with_revision(id.into(), RepoType::Model, at.into()));
        let api = api.map_err(|e| HubError::Answer {
            id: id.into(),
            file: "the model".into(),
            endpoint: options.shown_endpoint(),
            why: e.to_string(),
        })?;
        let branch = repo(&api, revision);
        let mut remote = Remote { id, revision, options, store, repo: branch, api, commit: String::new(), lock: None };
        let info = remote.retried(|| remote.repo.info()).map_err(|failure| remote.explain("the file list", failure))?;
        if !cache::legal_commit(&info.sha) {
            let why = Failure::Nonsense(format!("`{}` is no commit", info.sha.escape_debug()));
            return Err(remote.explain("the file list", why));
        }
        remote.repo = repo(&remote.api, &info.sha);
        remote.commit = info.sha;
        Ok((remote, info.siblings.into_iter().map(|s| s.rfilename).collect()))
    }

    /// Records the branch, now that all its files are here, and returns the snapshot folder.
    pub fn finish(self) -> Result<PathBuf, HubError> {
        self.store.record(self.revision, &self.commit)?;
        if self.lock.is_some() {
            self.store.clear_staging();
        }
        Ok(self.store.snapshot(&self.commit))
    }

    /// A file of the snapshot, downloaded if the cache does not hold it.
    pub fn obtain(&mut self, name: &str, events: &mut Events<'_>) -> Result<PathBuf, HubError> {
        let path = self.store.snapshot(&self.commit).join(name);
        if path.exists() {
            return Ok(path);
        }
        if self.lock.is_none() {
            self.lock = Some(self.store.lock(self.options.lock_wait)?);
            // Whoever held the lock may just have finished.
            if path.exists() {
                return Ok(path);
            }
        }
        let address = address_of(name);
        let probe = self.probe(name, &address)?;
        let blob = self.store.blob(&probe.key);
        if !std::fs::metadata(&blob).is_ok_and(|m| m.len() == probe.size) {
            events(HubEvent::FileStarted { name: name.into(), bytes: probe.size });
            self.download(name, &address, &probe, events)?;
            self.store.keep(&self.store.staged(&probe.etag), &probe.key)?;
            events(HubEvent::FileDone { name: name.into() });
        }
        self.store.link(&probe.key, &self.commit, name)
    }

    fn probe(&self, name: &str, address: &str) -> Result<Probe, HubError> {
        let found = match self.retried(|| self.api.metadata(&self.repo.url(address))) {
            // No byte can be asked of an empty file.
            Err(Failure::Status(416)) if select::may_be_empty(name) => return self.empty(),
            found => found.map_err(|failure| self.explain(name, failure))?,
        };
        let nonsense = |why: String| self.explain(name, Failure::Nonsense(why));
        if found.commit_hash() != self.commit {
            let commit = found.commit_hash().escape_debug();
            return Err(nonsense(format!("commit `{commit}` instead of `{}`", self.commit)));
        }
        let etag = found.etag().to_string();
        // The etag is a file name from here on.
        let key = cache::blob_key(&etag)
            .map(str::to_string)
            .ok_or_else(|| nonsense(format!("the etag `{}` is no name", etag.escape_debug())))?;
        Ok(Probe { etag, key, size: found.size() as u64 })
    }

    fn empty(&self) -> Result<Probe, HubError> {
        let staged = self.store.staged(EMPTY_BLOB);
        cache::create_folder(staged.parent().unwrap_or(&staged))?;
        std::fs::write(&staged, "").map_err(|e| cache::failed(&staged, &e))?;
        Ok(Probe { etag: EMPTY_BLOB.into(), key: EMPTY_BLOB.into(), size: 0 })
    }

    /// Brings the whole, checked file into staging.
    fn download(&self, name: &str, address: &str, probe: &Probe, events: &mut Events<'_>) -> Result<(), HubError> {
        let part = self.store.part(&probe.etag);
        self.sort_leftovers(probe);
        let (mut shown, mut idle, mut restarted) = (0, 0, false);
        loop {
            let before = length(&part);
            let resumed = before > 0 || self.store.staged(&probe.etag).exists();
            let meter = Meter { events: &mut *events, at: 0, shown: &mut shown, size: probe.size };
            let Err(failure) = self.attempt(name, address, probe, meter) else { break };
            match failure {
                // What lay here before may be to blame: once more from the first byte.
                Failure::Final(_) | Failure::Overlong | Failure::Status(416) if resumed && !restarted => {
                    let _ = std::fs::remove_file(&part);
                    restarted = true;
                }
                failure if !passing(&failure) => return Err(self.explain(name, failure)),
                failure => {
                    idle = if length(&part) > before { 0 } else { idle + 1 };
                    if idle > self.options.retries {
                        return Err(self.explain(name, failure));
                    }
                    self.pause(idle);
                }
            }
        }
        if shown < probe.size {
            events(HubEvent::Bytes(probe.size - shown));
        }
        Ok(())
    }

    /// Decides over what an interrupted run left, if it is a whole file: asking for more would be answered 416.
    fn sort_leftovers(&self, probe: &Probe) {
        let (staged, part) = (self.store.staged(&probe.etag), self.store.part(&probe.etag));
        if !part.exists() || length(&part) < probe.size {
            return;
        }
        // Kept only where its hash will be checked.
        let _ = if probe.sha256().is_some() { std::fs::rename(&part, &staged) } else { std::fs::remove_file(&part) };
    }

    /// One request, and the check of what came.
    fn attempt(&self, name: &str, address: &str, probe: &Probe, meter: Meter<'_, '_>) -> Result<(), Failure> {
        let (staged, part) = (self.store.staged(&probe.etag), self.store.part(&probe.etag));
        if !staged.exists() {
            self.store.clear_staged_links();
            guarded(|| self.repo.download_with_progress(address, meter))?;
        }
        self.store.clear_staged_links();
        let found = length(&staged);
        if found < probe.size {
            // A connection that ended early, but politely.
            std::fs::rename(&staged, &part).map_err(|e| Failure::Final(cache::failed(&part, &e)))?;
            return Err(Failure::Broken(format!("it ended after {found} of {} bytes", probe.size)));
        }
        self.check(name, &staged, probe).map_err(|error| {
            let _ = std::fs::remove_file(&staged);
            Failure::Final(error)
        })
    }

    /// Size, and SHA-256 where the hub states it.
    fn check(&self, name: &str, path: &Path, probe: &Probe) -> Result<(), HubError> {
        let (id, file, found) = (self.id.to_string(), name.to_string(), length(path));
        if found != probe.size {
            return Err(HubError::Size { id, file, found, wanted: probe.size });
        }
        let Some(wanted) = probe.sha256() else { return Ok(()) };
        let found = sha256(path).map_err(|e| cache::failed(path, &e))?;
        if found == wanted { Ok(()) } else { Err(HubError::Hash { id, file, found, wanted }) }
    }

    fn retried<T>(&self, request: impl Fn() -> Result<T, ApiError>) -> Result<T, Failure> {
        let mut tries = 0;
        loop {
            match guarded(&request) {
                Err(failure) if passing(&failure) && tries < self.options.retries => {
                    tries += 1;
                    self.pause(tries);
                }
                result => return result,
            }
        }
    }

    fn pause(&self, tries: u32) {
        let factor = 1 << tries.saturating_sub(1).min(16);
        std::thread::sleep(self.options.backoff.saturating_mul(factor).min(SLOWEST));
    }

    /// A failure as a person is told it.
    fn explain(&self, file: &str, failure: Failure) -> HubError {
        let (id, file, endpoint) = (self.id.to_string(), file.to_string(), self.options.shown_endpoint());
        let with_token = self.options.secret().is_some();
        match failure {
            Failure::Final(error) => error,
            Failure::Status(401) if with_token => HubError::TokenRefused { id, endpoint },
            Failure::Status(401) => HubError::NeedsToken { id, endpoint },
            Failure::Status(403) => HubError::Gated { id, endpoint },
            // Before the commit is known, the model itself was asked for.
            Failure::Status(404) if self.commit.is_empty() => {
                HubError::NotFound { id, revision: self.revision.into(), endpoint }
            }
            Failure::Status(404) => HubError::Answer { id, file, endpoint, why: "it is listed but not there".into() },
            Failure::Status(status) => HubError::Network { id, file, endpoint, why: format!("HTTP status {status}") },
            Failure::Broken(why) => HubError::Network { id, file, endpoint, why: self.without_secrets(why) },
            Failure::Overlong => HubError::Answer { id, file, endpoint, why: "it changed its size".into() },
            Failure::Locked => HubError::Busy { id },
            Failure::Disk(why) => HubError::Io { path: self.store.staging(), why },
            Failure::Nonsense(why) => HubError::Answer { id, file, endpoint, why: self.without_secrets(why) },
        }
    }

    fn without_secrets(&self, mut why: String) -> String {
        if let Ok(address) = self.options.address() {
            why = why.replace(address, &self.options.shown_endpoint());
        }
        match self.options.secret() {
            Some(token) => why.replace(token, "(hidden)"),
            None => why,
        }
    }
}

/// Runs a request. `hf-hub` asserts and unwraps on some answers of a broken server; that must not end us.
fn guarded<T>(request: impl FnOnce() -> Result<T, ApiError>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(request)) {
        Ok(result) => result.map_err(classified),
        Err(_) => Err(Failure::Nonsense("it cannot be followed".into())),
    }
}

fn classified(error: ApiError) -> Failure {
    use std::io::ErrorKind;
    match error {
        ApiError::RequestError(e) => {
            let text = e.to_string();
            match text.strip_prefix("http status: ").and_then(|status| status.parse().ok()) {
                Some(status) => Failure::Status(status),
                None if ["json: ", "http: ", "bad uri: "].iter().any(|kind| text.starts_with(kind)) => {
                    Failure::Nonsense(text)
                }
                None => Failure::Broken(text),
            }
        }
        ApiError::TooManyRetries(inner) => classified(*inner),
        ApiError::InvalidResume => Failure::Overlong,
        ApiError::LockAcquisition(_) => Failure::Locked,
        ApiError::IoError(e) => match e.kind() {
            // The rest comes from the connection, whose errors arrive in the same variant.
            ErrorKind::StorageFull
            | ErrorKind::QuotaExceeded
            | ErrorKind::PermissionDenied
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::NotFound
            | ErrorKind::AlreadyExists
            | ErrorKind::NotADirectory
            | ErrorKind::IsADirectory => Failure::Disk(e.to_string()),
            _ => Failure::Broken(e.to_string()),
        },
        other => Failure::Nonsense(other.to_string()),
    }
}

/// Whether a failure may pass by itself.
fn passing(failure: &Failure) -> bool {
    matches!(failure, Failure::Broken(_) | Failure::Status(408 | 429 | 500..=599))
}

/// The name as a part of an address, which `hf-hub` takes as it is.
fn address_of(name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~/".contains(&b);
    name.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |m| m.len())
}

fn sha256(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut hash = Sha256::new();
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&buffer[..n]),
        }
    }
}

/// Reports bytes, each once: `hf-hub` starts its count twice per attempt and again after a break.
struct Meter<'m, 'e> {
    events: &'m mut Events<'e>,
    at: u64,
    shown: &'m mut u64,
    size: u64,
}

impl Progress for Meter<'_, '_> {
    fn init(&mut self, _size: usize, _name: &str) {
        self.at = 0;
    }

    fn update(&mut self, bytes: usize) {
        self.at += bytes as u64;
        let reached = self.at.min(self.size);
        if reached > *self.shown {
            (self.events)(HubEvent::Bytes(reached - *self.shown));
            *self.shown = reached;
        }
    }

    fn finish(&mut self) {}
}
