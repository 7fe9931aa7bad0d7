//! Stands between a lane and its peer, and is a bad network on demand.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

/// Most bytes that are passed on at once.
const PORTION: usize = 16 << 10;

/// Passes bytes on both ways until it is told otherwise. Its threads end with their connections.
pub(crate) struct Relay {
    pub(crate) address: String,
    state: Arc<State>,
}

struct State {
    /// Bytes a second of all connections together, both ways; 0 for as many as there are.
    rate: u64,
    /// When the next byte may be passed on.
    due: Mutex<Instant>,
    /// Bytes of all connections together, both ways, since a cut was asked for.
    passed: AtomicU64,
    /// With so many of them all connections end, once.
    cut_at: AtomicU64,
    /// How often they did.
    cuts: AtomicU64,
    /// With so many of them nothing goes any more.
    stop_at: AtomicU64,
    /// The next answer is the last byte that is read.
    freezes: AtomicBool,
    frozen: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

impl Relay {
    /// In front of `to`, no faster than `rate` bytes a second if that is not 0.
    pub(crate) fn start(to: SocketAddr, rate: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let state = Arc::new(State {
            rate,
            due: Mutex::new(Instant::now()),
            passed: AtomicU64::new(0),
            cut_at: AtomicU64::new(u64::MAX),
            cuts: AtomicU64::new(0),
            stop_at: AtomicU64::new(u64::MAX),
            freezes: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            open: Mutex::default(),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { continue };
                let clone = |stream: &TcpStream| stream.try_clone().expect("a clone");
                let asks = (clone(&client), clone(&server));
                let answers = (clone(&server), clone(&client));
                shared.open.lock().expect("no panic").extend([client, server]);
                let (asking, answering) = (Arc::clone(&shared), Arc::clone(&shared));
                std::thread::spawn(move || asking.ask(asks));
                std::thread::spawn(move || answering.answer(answers));
            }
        });
        Self { address, state }
    }

    /// Ends all connections.
    pub(crate) fn cut(&self) {
        self.state.cut();
    }

    /// Ends all connections once so many bytes were passed on from here on, both ways together.
    pub(crate) fn cut_after(&self, bytes: u64) {
        self.state.passed.store(0, Ordering::SeqCst);
        self.state.cut_at.store(bytes, Ordering::SeqCst);
    }

    /// How often [`Self::cut_after`] ended connections.
    pub(crate) fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }

    /// Once so many bytes were passed on, both ways together, it reads and says nothing more, so that
    /// the buffers of both sides fill. Connections end when either side ends them.
    pub(crate) fn stop_after(&self, bytes: u64) {
        self.state.stop_at.store(bytes, Ordering::SeqCst);
    }

    /// From the next answer on the side that asks is like a stopped process: it takes nothing, so
    /// that the peer's buffers fill, and says nothing. Its connections end when it ends them.
    pub(crate) fn freeze(&self) {
        self.state.freezes.store(true, Ordering::SeqCst);
    }
}

impl State {
    fn cut(&self) {
        self.open.lock().expect("no panic").drain(..).for_each(|stream| end(&stream));
    }

    fn ask(&self, (mut from, mut to): (TcpStream, TcpStream)) {
        let mut bytes = [0; PORTION];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if !self.frozen.load(Ordering::SeqCst) && !self.pass(&from, &mut to, &bytes[..count]) {
                break;
            }
        }
        end(&to);
        end(&from);
    }

    fn answer(&self, (mut from, mut to): (TcpStream, TcpStream)) {
        let mut bytes = [0; PORTION];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if self.freezes.load(Ordering::SeqCst) {
                self.frozen.store(true, Ordering::SeqCst);
                wait_for_end([&to]);
                break;
            }
            if !self.pass(&from, &mut to, &bytes[..count]) {
                break;
            }
        }
        end(&to);
        end(&from);
    }

    /// Passes bytes on in their turn. False if the connection is over.
    fn pass(&self, from: &TcpStream, to: &mut TcpStream, bytes: &[u8]) -> bool {
        let count = bytes.len() as u64;
        let passed = self.passed.fetch_add(count, Ordering::SeqCst) + count;
        if passed >= self.cut_at.load(Ordering::SeqCst) {
            self.cut_at.store(u64::MAX, Ordering::SeqCst);
            self.cuts.fetch_add(1, Ordering::SeqCst);
            self.cut();
            return false;
        }
        if passed >= self.stop_at.load(Ordering::SeqCst) {
            wait_for_end([from, to]);
            return false;
        }
        self.wait_for_turn(bytes.len());
        to.write_all(bytes).is_ok()
    }

    fn wait_for_turn(&self, count: usize) {
        if let Some(nanoseconds) = (count as u64 * 1_000_000_000).checked_div(self.rate) {
            let mut due = self.due.lock().expect("no panic");
            let from = (*due).max(Instant::now());
            *due = from + Duration::from_nanos(nanoseconds);
            drop(due);
            std::thread::sleep(from.saturating_duration_since(Instant::now()));
        }
    }
}

/// Waits until one of them is ended by its other side, whatever is still to be read of it.
fn wait_for_end<const N: usize>(streams: [&TcpStream; N]) {
    let mut fds = streams.map(|stream| PollFd::new(stream, PollFlags::RDHUP));
    while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
}

fn end(stream: &TcpStream) {
    // The other side may have been quicker.
    let _ = stream.shutdown(Shutdown::Both);
}
