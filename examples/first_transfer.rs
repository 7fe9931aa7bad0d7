//! A first transfer: 64 scattered pages from one engine to another by one call, on host memory.
//!
//!     cargo run --example first_transfer

use std::time::Duration;

use kvferry::node::{Node, NodeOptions};
use kvferry::{Config, DeviceName, Engine, Op, Range, open_device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Decode: an engine with a cache, under a name that peers open. Or a process of its own.
    let host = open_device(DeviceName::Host, &Config::from_env()?)?;
    let decode = Engine::new(Config::from_env()?, vec![host.clone()])?;
    let theirs = decode.allocate(&host, 1 << 20)?;
    let node = Node::start(decode.clone(), &NodeOptions::default())?;

    // Prefill: it knows decode's name and which pages go where.
    let prefill = Engine::new(Config::from_env()?, vec![host.clone()])?;
    let ours = prefill.allocate(&host, 1 << 20)?;
    ours.write(0, &[42; 1 << 20])?;
    // A node that is dropped takes the peers with it that it opened.
    let opener = Node::start(prefill.clone(), &NodeOptions::default())?;
    let peer = opener.open(node.name())?;
    let page = |at: u64| Range {
        local: ours.addr() + at * 4096,
        remote: theirs.addr() + (63 - at) * 8192,
        len: 4096,
    };
    let pages: Vec<Range> = (0..64).map(page).collect();
    let batch = prefill.submit(peer.target(), Op::Write, &pages)?;
    let status = prefill.wait(batch, Duration::from_secs(10))?;
    println!("{:?}: {} bytes over {}", status.state, status.bytes, status.path);
    Ok(prefill.release(batch)?)
}
