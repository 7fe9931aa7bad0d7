//! What is logged, line by line.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

/// Where a subscriber writes to.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    pub(crate) fn read(&self) -> Vec<String> {
        let bytes = self.0.lock().expect("no panic").clone();
        String::from_utf8(bytes).expect("text").lines().map(String::from).collect()
    }
}

/// The warnings that are logged while `what` runs, on this thread.
pub(crate) fn warnings(what: impl FnOnce()) -> Vec<String> {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, what);
    lines.read()
}
