//! Stands between a lane and its peer, and is a bad network on demand.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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
                let (asking, ended) = (Arc::clone(&shared), Arc::new(AtomicBool::new(false)));
                let (answering, has_ended) = (Arc::clone(&shared), Arc::clone(&ended));
                std::thread::spawn(move || {
                    asking.ask(asks);
                    ended.store(true, Ordering::SeqCst);
                });
                std::thread::spawn(move || answering.answer(answers, &has_ended));
            }
        });
        Self { address, state }
    }

    /// Ends all connections.
    pub(crate) fn cut(&self) {
        self.state.open.lock().expect("no panic").drain(..).for_each(|stream| end(&stream));
    }

    /// From the next answer on the side that asks is like a stopped process: it takes nothing, so
    /// that the peer's buffers fill, and says nothing. Its connections end when it ends them, or
    /// the peer does.
    pub(crate) fn freeze(&self) {
        self.state.freezes.store(true, Ordering::SeqCst);
    }
}

impl State {
    fn ask(&self, (mut from, mut to): (TcpStream, TcpStream)) {
        let mut bytes = [0; PORTION];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if self.frozen.load(Ordering::SeqCst) {
                continue;
            }
            self.wait_for_turn(count);
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        end(&to);
        end(&from);
    }

    fn answer(&self, (mut from, mut to): (TcpStream, TcpStream), ended: &AtomicBool) {
        let mut bytes = [0; PORTION];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if self.freezes.load(Ordering::SeqCst) {
                self.frozen.store(true, Ordering::SeqCst);
                while !ended.load(Ordering::SeqCst) {
                    std::thread::park_timeout(Duration::from_millis(10));
                }
                break;
            }
            self.wait_for_turn(count);
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        end(&to);
        end(&from);
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

fn end(stream: &TcpStream) {
    // The other side may have been quicker.
    let _ = stream.shutdown(Shutdown::Both);
}
