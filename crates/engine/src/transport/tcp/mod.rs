//! Copies to and from engines that no mapping reaches: over several TCP connections, by the batch
//! protocol of `kvferry_wire`.
//!
//! A batch is checked as for any transport, and divided; whichever lane of the peer is free takes the
//! next share and makes a request of it. The peer checks it again by itself: it serves names and
//! offsets, never addresses.

mod channel;
mod cut;
mod layout;
mod plan;
mod server;
mod session;
mod threads;
mod transfer;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use kvferry_device::Producer;
use kvferry_wire::batch::{Key, Limits};
use rustix::fs::{Mode, OFlags};

use super::fences::{Order, wait_for};
use super::lane::DeviceLanes;
use super::peer::Peer;
use super::staging::Staging;
use crate::config::{Config, OverlapCheck};
use crate::error::{Error, Result};
use crate::pinned::PinnedAccount;
use crate::plan::Scratch;
use crate::registry::Registry;
use crate::request::Part;
use crate::segment::Identity;

pub use server::Listener;
pub(crate) use session::Session;
use session::SessionShared;
use threads::{Spread, Threads};
pub(crate) use transfer::Transfer;

/// The TCP transport of one engine: its threads, staging and lanes.
#[derive(Debug)]
pub(crate) struct Tcp {
    shared: Arc<Shared>,
    sessions: Mutex<HashMap<Peering, Weak<SessionShared>>>,
    overlap_check: OverlapCheck,
    /// One for each thread that has ever planned at the same time as others.
    scratches: Mutex<Vec<Scratch>>,
    threads: Threads,
}

/// Address and incarnation of a peer.
type Peering = (String, [u8; 16]);

/// What all connections of an engine share.
#[derive(Debug)]
pub(super) struct Shared {
    threads: Spread,
    staging: Arc<Staging>,
    incarnation: Identity,
    lanes: usize,
    limits: Limits,
    timeout: Duration,
    key: Option<Key>,
    checksums: bool,
}

impl Tcp {
    pub(crate) fn new(
        config: &Config,
        devices: &[Arc<DeviceLanes>],
        account: &Arc<PinnedAccount>,
        incarnation: Identity,
    ) -> Result<Self> {
        let key = config.auth_key_file.as_deref().map(read_key).transpose()?;
        let threads = Threads::new(config.tcp_threads);
        let staging = Arc::new(Staging::new(config, devices, account)?);
        let timeout = config.tcp_status_timeout;
        let limits = Limits {
            slot_bytes: staging.slice_bytes() as u32,
            requests: 4,
            progress_ms: timeout.as_millis() as u32,
            ..Limits::default()
        };
        let shared = Arc::new(Shared {
            threads: threads.spread().clone(),
            staging,
            incarnation,
            lanes: config.tcp_lanes,
            limits,
            timeout,
            key,
            checksums: config.tcp_checksums,
        });
        tracing::debug!(threads = config.tcp_threads, "TCP started");
        Ok(Self {
            shared,
            sessions: Mutex::default(),
            overlap_check: config.overlap_check,
            scratches: Mutex::default(),
            threads,
        })
    }

    /// The lanes to that engine at that address, for one more target; they connect when they have
    /// something to do.
    ///
    /// # Errors
    /// [`Error::System`] if its threads cannot be started.
    pub(crate) fn session(
        &self,
        peer: &str,
        address: &str,
        incarnation: Identity,
    ) -> Result<Arc<Session>> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, session| session.strong_count() > 0);
        let key = (address.to_owned(), incarnation.0);
        let known = sessions.get(&key).and_then(Weak::upgrade);
        if let Some(session) = known.and_then(|shared| Session::join(shared, peer)) {
            return Ok(session);
        }
        let session = Session::new(&self.shared, peer, address, incarnation)?;
        sessions.insert(key, Arc::downgrade(session.shared()));
        Ok(session)
    }

    /// Serves the registry's memory to other engines.
    pub(crate) fn listen(
        &self,
        registry: &Arc<Registry>,
        address: std::net::SocketAddr,
    ) -> Result<Listener> {
        Listener::start(&self.shared, registry, address)
    }

    /// Ends all lanes and whatever is served to peers. Copies that were submitted run to their ends.
    pub(crate) fn close(&self) {
        self.threads.close();
    }

    /// Bytes of the pinned slots.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.shared.staging.slot_bytes()
    }

    /// Bytes of pinned memory for staging, with what its queues hold.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let staging = &self.shared.staging;
        staging.slot_bytes() + staging.queue_bytes()
    }

    /// Starts planned parts, behind the producer if there is one.
    ///
    /// # Errors
    /// If the producer cannot be waited for: nothing was started.
    pub(crate) fn start(
        &self,
        peer: &Peer,
        planned: plan::Planned,
        parts: &[&Part<'_>],
        after: Option<Producer>,
    ) -> Result<Arc<Transfer>> {
        let transfer = Arc::clone(planned.transfer());
        let lanes = self.shared.lanes;
        let Some(producer) = after else {
            planned.start(parts, lanes, |session, job| session.submit(job));
            return Ok(transfer);
        };
        let lane = Arc::clone(peer.lane(planned.device));
        let ticket = wait_for(&lane, Order { after: Some(producer), ..Order::NONE })?;
        // The caller's lists are gone when the producer is done. A session lives as long as something
        // of it is held, by the batch's target.
        let mut sessions: Vec<Weak<Session>> = Vec::new();
        planned.start(parts, lanes, |session, job| {
            if sessions.last().is_none_or(|last| last.as_ptr() != Arc::as_ptr(session)) {
                sessions.push(Arc::downgrade(session));
            }
            session.hold(job);
        });
        let held = Arc::clone(&transfer);
        let ended = move |ended: Result<()>| {
            let sessions = sessions.iter().filter_map(Weak::upgrade);
            sessions.for_each(|session| session.produced(&held, &ended));
        };
        self.shared.staging.watcher().watch(lane, ticket, Box::new(ended));
        Ok(transfer)
    }
}

/// Reads the key that both ends of a lane have, from a file that nobody else can read or write.
fn read_key(path: &Path) -> Result<Key> {
    let refused = |reason: String| Error::AuthKey { path: path.display().to_string(), reason };
    let system = |error: rustix::io::Errno| refused(error.to_string());
    // Not blocking, should it be a pipe.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(system)?;
    let stat = rustix::fs::fstat(&file).map_err(system)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
        return Err(refused("it is not a regular file".into()));
    }
    if stat.st_mode & 0o077 != 0 || stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(refused("it has to be this user's, with mode 0600".into()));
    }
    let mut bytes = vec![0; Key::MOST + 1];
    let mut count = 0;
    loop {
        match rustix::io::read(&file, &mut bytes[count..]).map_err(system)? {
            0 => break,
            more => count += more,
        }
    }
    Key::new(&bytes[..count]).map_err(|error| refused(error.to_string()))
}
