use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_engine::{ExportsError, Identity, Segment, Segments, Target, Way};

use crate::address::Address;
use crate::describe;
use crate::error::NodeError;
use crate::handshake;
use crate::monitor::Watch;

/// An opened peer. Keep it as long as its target is used: it is what notices the peer's death. It
/// needs the engine of the node that opened it, and not the node.
#[derive(Debug)]
pub struct Peer {
    address: Address,
    target: Target,
    /// Why none of its memory is mapped, if none is.
    why_far: Option<String>,
    /// Of a peer on this host.
    _watch: Option<Watch>,
}

/// What a peer publishes under its address.
#[derive(Debug)]
struct Published {
    peer: String,
    address: Address,
    /// When it last did not answer.
    silent: Mutex<Option<Instant>>,
}

/// How long one that did not answer is not asked again: each time may cost a submission seconds.
const PAUSE: Duration = Duration::from_secs(30);

impl Segments for Published {
    fn fetch(&self) -> Result<Segment, ExportsError> {
        let Self { peer, address, silent } = self;
        // The target asks for one segment at a time, so nobody waits here.
        let mut silent = silent.lock().unwrap_or_else(PoisonError::into_inner);
        if silent.is_some_and(|since| since.elapsed() < PAUSE) {
            return Err("it did not answer moments ago".into());
        }
        let fetched = handshake::fetch(address);
        *silent = fetched.is_err().then(Instant::now);
        let extension = fetched?.kvferry.ok_or("it is no kvferry node now")?;
        Ok(describe::segment(peer, &extension))
    }
}

impl Peer {
    /// One on this host.
    pub(crate) fn mapped(address: Address, target: Target, watch: Watch) -> Self {
        Self::new(address, target, None, Some(watch))
    }

    /// One that TCP alone reaches.
    pub(crate) fn over_tcp(address: Address, target: Target, why_far: String) -> Self {
        Self::new(address, target, Some(why_far), None)
    }

    fn new(
        address: Address,
        target: Target,
        why_far: Option<String>,
        watch: Option<Watch>,
    ) -> Self {
        let (peer, silent) = (target.name().to_owned(), Mutex::default());
        let published = Published { peer, address: address.clone(), silent };
        target.refresh_from(Arc::new(published));
        Self { address, target, why_far, _watch: watch }
    }

    /// The name it was opened with.
    pub fn name(&self) -> &str {
        self.target.name()
    }

    /// What transfers name.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Which way its memory is reached now, and why not a better one. Mappings that turn out not to
    /// work are known from the first transfer on that needed them.
    pub fn way(&self) -> Way {
        let mut way = self.target.way();
        way.reasons.extend(self.why_far.clone());
        way
    }

    /// Whether nobody declared it lost. A peer that ends, or whose node is closed, is lost within
    /// moments; one that is stopped or slow is not.
    pub fn is_alive(&self) -> bool {
        self.target.lost().is_none()
    }

    /// Fetches the peer's descriptor again, so that transfers see what it registered since, and no more
    /// what it withdrew. Memory that is not known yet needs no call: the first transfer that names it
    /// does this.
    ///
    /// # Errors
    /// [`NodeError::PeerRestarted`] if another engine answers; the target is then lost, and
    /// opening the name again gives one that works. Otherwise the target stays as it was.
    pub fn refresh(&self) -> Result<(), NodeError> {
        self.target.refresh_with(|| self.fetch())
    }

    /// What it publishes now.
    fn fetch(&self) -> Result<Segment, NodeError> {
        let peer = self.name();
        let descriptor = handshake::fetch(&self.address)?;
        let expected = self.target.incarnation();
        let found = descriptor.kvferry.as_ref().map(|extension| Identity(extension.incarnation.0));
        let Some(extension) = descriptor.kvferry.filter(|_| found == Some(expected)) else {
            let found = found.map_or("one that is not kvferry's".into(), |found| found.to_string());
            self.target.lose(&format!("it was restarted: engine {found} answers under its name"));
            return Err(NodeError::PeerRestarted {
                peer: peer.to_owned(),
                expected: expected.to_string(),
                found,
            });
        };
        tracing::debug!(peer, regions = extension.regions.len(), "fetched a peer's descriptor");
        Ok(describe::segment(peer, &extension))
    }
}
