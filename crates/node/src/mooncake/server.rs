use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_engine::Op;
use kvferry_wire::mooncake::{Closing, Header, Op as WireOp, Server, Version};
use rustix::net::Shutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::MooncakeLimits;
use super::connection::Connection;
use super::memory::{Memory, MoveError};
use crate::describe::Local;

/// How long the listener rests after an error that will not go away by asking again.
const REST: Duration = Duration::from_millis(100);

/// How long a connection may be idle however many wait: what was asked on a new one may be on its way.
const GRACE: Duration = Duration::from_millis(250);

/// How long a client that was refused may take to hear of it.
const LINGER: Duration = Duration::from_secs(5);

/// Serves connections for ever.
pub(super) async fn accept(local: Arc<Local>, listener: TcpListener, limits: MooncakeLimits) {
    let places = Arc::new(Semaphore::new(limits.connections.clamp(1, Semaphore::MAX_PERMITS)));
    let idle = Arc::new(Idle::default());
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let Some(place) = place(&places, &idle).await else { return };
                let (local, idle) = (Arc::clone(&local), Arc::clone(&idle));
                tokio::spawn(async move {
                    serve(&local, &idle, &limits, stream, peer).await;
                    drop(place);
                });
            }
            Err(error) => {
                // Out of descriptors, most likely: asking again at once would spin.
                tracing::warn!(%error, "cannot accept data connections, trying again");
                sleep(REST).await;
            }
        }
    }
}

/// A place for one more connection: a free one, that of the longest idle connection, or the first
/// that becomes either.
async fn place(places: &Arc<Semaphore>, idle: &Idle) -> Option<OwnedSemaphorePermit> {
    if let Ok(place) = Arc::clone(places).try_acquire_owned() {
        return Some(place);
    }
    let mut free = std::pin::pin!(Arc::clone(places).acquire_owned());
    loop {
        let again = async {
            match idle.evict() {
                Eviction::Done => idle.survived.notified().await,
                Eviction::At(moment) => sleep_until(moment).await,
                Eviction::None => idle.grew.notified().await,
            }
        };
        tokio::select! {
            place = &mut free => return place.ok(),
            () = again => {}
        }
    }
}

/// Connections that carry no operation, the longest idle first.
#[derive(Debug, Default)]
struct Idle {
    list: Mutex<List>,
    /// Told of each one that comes.
    grew: Notify,
    /// Told of one that was evicted in the moment in which it was asked for something.
    survived: Notify,
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    connections: BTreeMap<u64, (Instant, Arc<Notify>)>,
}

enum Eviction {
    /// One was told to end.
    Done,
    /// The first one may be told then.
    At(Instant),
    /// None is idle.
    None,
}

/// A connection in the list.
struct Listed<'a> {
    idle: &'a Idle,
    key: u64,
    evicted: Arc<Notify>,
}

impl Idle {
    fn enter(&self) -> Listed<'_> {
        let evicted = Arc::new(Notify::new());
        let key = {
            let list = &mut *self.list();
            list.next += 1;
            list.connections.insert(list.next, (Instant::now(), Arc::clone(&evicted)));
            list.next
        };
        self.grew.notify_one();
        Listed { idle: self, key, evicted }
    }

    /// Ends the longest idle connection, if it has been so for long enough.
    fn evict(&self) -> Eviction {
        let mut list = self.list();
        let Some(oldest) = list.connections.first_entry() else { return Eviction::None };
        let moment = oldest.get().0 + GRACE;
        if Instant::now() < moment {
            return Eviction::At(moment);
        }
        let (_, evicted) = oldest.remove();
        evicted.notify_one();
        Eviction::Done
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listed<'_> {
    /// Takes it off the list, to carry an operation.
    fn carry(self) {
        if self.idle.list().connections.remove(&self.key).is_none() {
            self.idle.survived.notify_one();
        }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.idle.list().connections.remove(&self.key);
    }
}

/// How a connection ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error(transparent)]
    Said(Closing),
    #[error("nothing was asked on it")]
    Idle,
    #[error("the client sent, or took, too little for too long")]
    Stalled,
    #[error("it broke: {0}")]
    Broken(io::Error),
    #[error("{0}")]
    Device(kvferry_engine::Error),
    #[error("the region was unregistered meanwhile")]
    Withdrawn,
}

async fn serve(
    local: &Local,
    idle: &Idle,
    limits: &MooncakeLimits,
    stream: TcpStream,
    peer: SocketAddr,
) {
    let mut connection = Connection::new(stream, super::progress(&local.engine));
    let (end, rejected) = operate(local, idle, limits, &mut connection).await;
    let node = &local.name;
    match &end {
        End::Said(Closing::Ended) | End::Idle => {
            tracing::debug!(node, %peer, reason = %end, "closed a data connection");
        }
        End::Device(error) => {
            tracing::warn!(node, %peer, %error, "registered memory could not be served");
        }
        End::Said(_) | End::Stalled | End::Broken(_) | End::Withdrawn => {
            if !rejected {
                local.reject();
            }
            tracing::debug!(node, %peer, reason = %end, "ended a data connection");
        }
    }
    if let End::Said(Closing::Rejected { version: Version::V2, .. }) = end {
        // The client may be sending still, and closing with unread bytes would reset the connection
        // and could take the status back.
        let _ = rustix::net::shutdown(&connection.stream, Shutdown::Write);
        let _ = timeout(LINGER, drain(&connection.stream)).await;
    }
}

/// Serves operation after operation. Also says whether the last one was rejected, and is counted as
/// such.
async fn operate(
    local: &Local,
    idle: &Idle,
    limits: &MooncakeLimits,
    connection: &mut Connection,
) -> (End, bool) {
    let mut server = Server::new();
    let mut memory: Option<Memory> = None;
    let mut asked: Option<Header> = None;
    // What the client is told is counted before: who hears it may ask for the count.
    let mut rejected = false;
    let count = |done: Header| {
        let op = match done.op {
            WireOp::Read => Op::Read,
            WireOp::Write => Op::Write,
        };
        local.served.count(op, done.length);
    };
    let end = loop {
        if server.is_rejected() && !rejected {
            rejected = true;
            local.reject();
        }
        if let Some(closing) = server.closing() {
            break End::Said(closing);
        }
        if let Some(request) = server.request() {
            asked = Some(request);
            memory = lease(local, request);
            match &memory {
                Some(_) => server.allow(),
                None => server.reject(),
            }
            continue;
        }
        if server.written().is_some() {
            memory = None;
            asked.take().into_iter().for_each(count);
            server.applied();
            continue;
        }
        if server.is_idle() {
            memory = None;
            asked.take().into_iter().for_each(count);
            let listed = idle.enter();
            // What waits already is taken first: a busy connection never sets the timer.
            let begun = tokio::select! {
                biased;
                begun = connection.begin(&mut server) => begun,
                () = listed.evicted.notified() => break End::Idle,
                () = sleep(limits.idle) => break End::Idle,
            };
            // A reset between operations takes nothing away.
            if begun.is_err() {
                break End::Said(Closing::Ended);
            }
            listed.carry();
            continue;
        }
        if memory.as_ref().is_some_and(Memory::is_withdrawn) {
            break End::Withdrawn;
        }
        match connection.advance(&mut server, memory.as_mut()).await {
            Ok(()) => {}
            Err(MoveError::Device(error)) => break End::Device(error),
            Err(MoveError::Socket(error)) if error.kind() == io::ErrorKind::TimedOut => {
                break End::Stalled;
            }
            Err(MoveError::Socket(error)) => break End::Broken(error),
        }
    };
    (end, rejected)
}

/// Reads until the client closes.
async fn drain(stream: &TcpStream) {
    while stream.readable().await.is_ok() {
        // Else nobody looks at the time while bytes keep coming.
        tokio::task::consume_budget().await;
        // Not kept while it waits: there are many connections.
        match stream.try_read(&mut [0; 16 << 10]) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

/// The bytes of a request, if one registered region has them all.
fn lease(local: &Local, Header { addr, length, .. }: Header) -> Option<Memory> {
    let lease = local.engine.lease(addr, length).filter(|lease| lease.len() == length)?;
    Some(Memory::new(Arc::new(lease), 0))
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use tokio::io::AsyncWriteExt;
    use tokio::task::consume_budget;

    use super::*;

    #[tokio::test]
    async fn a_client_that_never_stops_sending_is_drained_for_no_longer_than_the_time_allows() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (mut client, (server, _)) = (client.unwrap(), server.unwrap());
        client.write_all(&[7; 4096]).await.unwrap();
        server.readable().await.unwrap();
        let mut drained = pin!(drain(&server));
        // Once it has done as much as a task may at once, timers have their turn.
        let is_pending = poll_fn(|context| {
            while pin!(consume_budget()).poll(context).is_ready() {}
            Poll::Ready(drained.as_mut().poll(context).is_pending())
        });
        assert!(is_pending.await);
        assert_eq!(server.try_read(&mut [0]).unwrap(), 1, "it went on");
    }
}
