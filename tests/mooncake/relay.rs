//! A name that stays while the process behind it changes. Stock Mooncake takes a port at random, so
//! it cannot be told to come back under its name.

use std::io::copy;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// Passes handshakes on until the test process ends.
pub(crate) struct Relay {
    address: String,
    target: Arc<Mutex<String>>,
}

impl Relay {
    pub(crate) fn start(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let target = Arc::new(Mutex::new(target.to_owned()));
        let current = Arc::clone(&target);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let target: SocketAddr =
                    current.lock().expect("whole").parse().expect("an address");
                // One that is gone: the client sees its connection closed.
                let Ok(server) = TcpStream::connect(target) else { continue };
                thread::spawn(move || pass(&client, &server));
            }
        });
        Self { address, target }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn lead_to(&self, target: &str) {
        *self.target.lock().expect("whole") = target.to_owned();
    }
}

fn pass(client: &TcpStream, server: &TcpStream) {
    thread::scope(|scope| {
        let one_way = |mut from: &TcpStream, mut to: &TcpStream| {
            let _ = copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        };
        scope.spawn(move || one_way(client, server));
        one_way(server, client);
    });
}
