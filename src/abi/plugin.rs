//! Engines by their numbers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvferry_engine::{Buffer, Engine};
use kvferry_node::{Node, Peer};

use super::status::Refusal;
use super::types::{EngineHandle, TargetHandle};

/// What an engine handle stands for. Its node, with the threads that serve peers, goes first.
#[derive(Debug)]
pub(super) struct Plugin {
    pub(super) node: Arc<Node>,
    pub(super) engine: Arc<Engine>,
    targets: RwLock<HashMap<u64, Arc<Peer>>>,
    next_target: AtomicU64,
    /// By address.
    buffers: Mutex<HashMap<u64, Buffer>>,
    /// Beginnings of regions that were accepted and ignored.
    ignored: Mutex<HashSet<u64>>,
}

static PLUGINS: RwLock<BTreeMap<EngineHandle, Arc<Plugin>>> = RwLock::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

fn plugins() -> RwLockReadGuard<'static, BTreeMap<EngineHandle, Arc<Plugin>>> {
    PLUGINS.read().unwrap_or_else(PoisonError::into_inner)
}

fn plugins_mut() -> RwLockWriteGuard<'static, BTreeMap<EngineHandle, Arc<Plugin>>> {
    PLUGINS.write().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(handle: EngineHandle) -> Refusal {
    Refusal::not_found(format!("engine {handle} does not exist: it was destroyed, or never was"))
}

/// The engine of a handle, which lives on while the result does.
pub(super) fn find(handle: EngineHandle) -> Result<Arc<Plugin>, Refusal> {
    plugins().get(&handle).cloned().ok_or_else(|| unknown(handle))
}

pub(super) fn insert(node: Arc<Node>) -> EngineHandle {
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    let plugin = Plugin {
        engine: Arc::clone(node.engine()),
        node,
        targets: RwLock::default(),
        next_target: AtomicU64::new(1),
        buffers: Mutex::default(),
        ignored: Mutex::default(),
    };
    plugins_mut().insert(handle, Arc::new(plugin));
    handle
}

/// Ends an engine, once the calls that other threads are in have returned. Its regions end here,
/// whoever uses them now, so that the caller may free their memory.
pub(super) fn remove(handle: EngineHandle) -> Result<(), Refusal> {
    let plugin = plugins_mut().remove(&handle).ok_or_else(|| unknown(handle))?;
    let ended = plugin.engine.unregister_all();
    // Buffers hold the engine, so they go by hand.
    plugin.buffers().clear();
    Ok(ended?)
}

impl Plugin {
    pub(super) fn add_target(&self, engine: EngineHandle, peer: Peer) -> TargetHandle {
        let id = self.next_target.fetch_add(1, Ordering::Relaxed);
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        targets.insert(id, Arc::new(peer));
        TargetHandle { engine, id }
    }

    pub(super) fn target(&self, handle: TargetHandle) -> Result<Arc<Peer>, Refusal> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        targets.get(&handle.id).cloned().ok_or_else(|| unknown_target(handle))
    }

    pub(super) fn close(&self, handle: TargetHandle) -> Result<(), Refusal> {
        let peer = {
            let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
            targets.remove(&handle.id)
        };
        // Dropped without the lock: it closes mappings, and submissions look for their targets.
        peer.map(drop).ok_or_else(|| unknown_target(handle))
    }

    pub(super) fn buffers(&self) -> MutexGuard<'_, HashMap<u64, Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ignored(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.ignored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown_target(handle: TargetHandle) -> Refusal {
    let TargetHandle { engine, id } = handle;
    Refusal::not_found(format!("target {id} of engine {engine} does not exist: it was closed"))
}
