//! A stand-in for the model hub on 127.0.0.1: the file list, and files in ranges.
//!
//! Written on plain sockets, since it must be able to cut a connection in the middle of a body.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sha2::{Digest, Sha256};

pub const MODEL: &str = "acme/tiny";
pub const COMMIT: &str = "1111111111111111111111111111111111111111";

/// What the hub serves and how it misbehaves; may be changed while it runs.
pub struct Hub {
    pub files: BTreeMap<String, Vec<u8>>,
    /// Branch, tag or commit, and the commit it stands at.
    pub revisions: BTreeMap<String, String>,
    /// More names for the list, without files.
    pub extra_names: Vec<String>,
    /// Etags other than the content's own.
    pub etags: BTreeMap<String, String>,
    /// Every request must carry this token.
    pub token: Option<String>,
    /// Answer requests for a file (or `list`) with this status, so many times.
    pub status: BTreeMap<String, (u16, usize)>,
    /// Cut bodies after so many bytes: each entry once, in order, on the next body longer than that.
    pub cut: Vec<usize>,
    /// As `cut`, but ending the body properly, without a length.
    pub cut_politely: bool,
    /// Files whose bytes come altered.
    pub spoiled: Vec<String>,
    /// Give the whole file whatever range is asked for.
    pub ignore_range: bool,
    /// Answer 416 to so many requests that do not begin at the first byte.
    pub refuse_resume: usize,
    /// Send safetensors elsewhere, as the hub does with large files.
    pub redirect: bool,
    /// Do so without saying where.
    pub redirect_nowhere: bool,
    /// The commit the file headers state.
    pub stated_commit: Option<String>,
    /// Everything asked so far.
    pub seen: Vec<Seen>,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

pub struct HubServer {
    hub: Arc<Mutex<Hub>>,
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HubServer {
    pub fn start(files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        let files: BTreeMap<_, _> = files.into_iter().map(|(name, bytes)| (name.to_string(), bytes)).collect();
        let revisions = ["main", COMMIT].map(|revision| (revision.to_string(), COMMIT.to_string())).into();
        let hub = Arc::new(Mutex::new(Hub {
            files,
            revisions,
            extra_names: vec![],
            etags: BTreeMap::new(),
            token: None,
            status: BTreeMap::new(),
            cut: vec![],
            cut_politely: false,
            spoiled: vec![],
            ignore_range: false,
            refuse_resume: 0,
            redirect: false,
            redirect_nowhere: false,
            stated_commit: None,
            seen: vec![],
        }));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (hub, stop) = (hub.clone(), stop.clone());
            move || {
                for stream in listener.incoming() {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    // A client that goes away is no concern of the server.
                    let _ = stream.and_then(|stream| serve(stream, &mut hub.lock().unwrap(), address));
                }
            }
        });
        Self { hub, address, stop, thread: Some(thread) }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn change(&self, change: impl FnOnce(&mut Hub)) {
        change(&mut self.hub.lock().unwrap());
    }

    /// The requests since the last call.
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.hub.lock().unwrap().seen)
    }
}

impl Drop for HubServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// The etag the hub gives: the SHA-256 of weights, something shorter for the rest.
pub fn etag(name: &str, bytes: &[u8]) -> String {
    let hash = sha256(bytes);
    if name.ends_with(".safetensors") { hash } else { hash[..40].to_string() }
}

/// One request a connection.
fn serve(mut stream: TcpStream, hub: &mut Hub, address: SocketAddr) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_string();
    let (mut range, mut token) = (None, None);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? <= 2 {
            break;
        }
        let (field, value) = line.split_once(':').unwrap_or_default();
        match &*field.to_lowercase() {
            "range" => range = Some(value.trim().to_string()),
            "authorization" => token = value.trim().strip_prefix("Bearer ").map(str::to_string),
            _ => {}
        }
    }
    hub.seen.push(Seen { path: path.clone(), range: range.clone(), token: token.clone() });
    answer(&mut stream, hub, address, &path, range.as_deref(), token)?;
    stream.shutdown(Shutdown::Both)
}

fn answer(
    stream: &mut TcpStream,
    hub: &mut Hub,
    address: SocketAddr,
    path: &str,
    range: Option<&str>,
    token: Option<String>,
) -> std::io::Result<()> {
    // What another host serves knows nothing of tokens.
    if let Some(name) = path.strip_prefix("/store/") {
        return file(stream, hub, &decoded(name), "", range);
    }
    if hub.token.is_some() && hub.token != token {
        return status(stream, 401);
    }
    if let Some(revision) = path.strip_prefix(&format!("/api/models/{MODEL}/revision/")) {
        if let Some(code) = forced(hub, "list") {
            return status(stream, code);
        }
        let Some(commit) = hub.revisions.get(&revision.replace("%2F", "/")) else { return status(stream, 404) };
        let names: Vec<_> = hub.files.keys().chain(&hub.extra_names).collect();
        let siblings: Vec<_> = names.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let body = serde_json::json!({ "id": MODEL, "sha": commit, "siblings": siblings }).to_string();
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())?;
        return Ok(());
    }
    let Some((revision, name)) = path.strip_prefix(&format!("/{MODEL}/resolve/")).and_then(|p| p.split_once('/'))
    else {
        return status(stream, 404);
    };
    let name = decoded(name);
    if let Some(code) = forced(hub, &name) {
        return status(stream, code);
    }
    let commit = hub.revisions.get(&revision.replace("%2F", "/"));
    let (Some(commit), Some(bytes)) = (commit, hub.files.get(&name)) else { return status(stream, 404) };
    let commit = hub.stated_commit.as_ref().unwrap_or(commit);
    let etag = hub.etags.get(&name).cloned().unwrap_or_else(|| etag(&name, bytes));
    if (hub.redirect || hub.redirect_nowhere) && name.ends_with(".safetensors") {
        let location = format!("Location: http://{address}/store/{name}\r\n");
        let location = if hub.redirect_nowhere { "" } else { &location };
        return write!(
            stream,
            "HTTP/1.1 302 Found\r\n{location}X-Linked-Etag: \"{etag}\"\r\nX-Repo-Commit: {commit}\r\n\
             Content-Length: 0\r\nConnection: close\r\n\r\n"
        );
    }
    let headers = format!("ETag: \"{etag}\"\r\nX-Repo-Commit: {commit}\r\n");
    file(stream, hub, &name, &headers, range)
}

fn file(stream: &mut TcpStream, hub: &mut Hub, name: &str, headers: &str, range: Option<&str>) -> std::io::Result<()> {
    let Some(bytes) = hub.files.get(name) else { return status(stream, 404) };
    let mut bytes = bytes.clone();
    if hub.spoiled.iter().any(|spoiled| spoiled == name) {
        *bytes.last_mut().unwrap() ^= 1;
    }
    let total = bytes.len();
    let (start, end) = range.and_then(|r| r.strip_prefix("bytes=")?.split_once('-')).unwrap_or(("0", ""));
    let probe = end == "0";
    let start = if hub.ignore_range { 0 } else { start.parse().unwrap_or(0) };
    if start > 0 && hub.refuse_resume > 0 {
        hub.refuse_resume -= 1;
        return status(stream, 416);
    }
    if start >= total {
        return status(stream, 416);
    }
    let end = end.parse().map_or(total, |end: usize| (end + 1).min(total));
    let body = &bytes[start..end];
    let cut = hub.cut.first().copied().filter(|after| !probe && *after < body.len());
    if cut.is_some() {
        hub.cut.remove(0);
    }
    let length = match cut {
        Some(_) if hub.cut_politely => String::new(),
        _ => format!("Content-Length: {}\r\n", body.len()),
    };
    write!(
        stream,
        "HTTP/1.1 206 Partial Content\r\n{headers}{length}Content-Range: bytes {start}-{}/{total}\r\n\
         Connection: close\r\n\r\n",
        end - 1
    )?;
    stream.write_all(&body[..cut.unwrap_or(body.len())])
}

fn forced(hub: &mut Hub, name: &str) -> Option<u16> {
    let (code, times) = hub.status.get_mut(name)?;
    *times = times.checked_sub(1)?;
    Some(*code)
}

fn status(stream: &mut TcpStream, code: u16) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {code} Status\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

fn decoded(name: &str) -> String {
    name.replace("%20", " ")
}
