//! What bare sockets carry: as many connections as the transfer has lanes, one thread each at both
//! ends, host memory that nobody looks at. The ceiling of a transfer over TCP.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Barrier;
use std::time::Instant;

use crate::Failure;
use crate::transfer::nanoseconds;

/// Bytes of one write: what LAB.md's raw sockets use.
const CHUNK: usize = 4 << 20;

/// Receives on so many connections of loopback until each has ended, in the background. The port.
pub(crate) fn receive(lanes: usize) -> Result<u16, Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(lanes).flatten() {
            std::thread::spawn(move || receive_all(stream));
        }
    });
    Ok(port)
}

fn receive_all(mut stream: TcpStream) -> std::io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut share = [0; 8];
    stream.read_exact(&mut share)?;
    let share = u64::from_le_bytes(share);
    loop {
        let mut left = share;
        while left > 0 {
            let most = left.min(CHUNK as u64) as usize;
            match stream.read(&mut buffer[..most])? {
                0 => return Ok(()),
                count => left -= count as u64,
            }
        }
        stream.write_all(&[1])?;
    }
}

/// Sends `bytes` over all connections together, so many times; nanoseconds of each.
pub(crate) fn send(port: u16, lanes: usize, bytes: u64, times: usize) -> Result<Vec<u64>, Failure> {
    let share = bytes.div_ceil(lanes as u64).max(1);
    let mut streams = Vec::with_capacity(lanes);
    for _ in 0..lanes {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        stream.write_all(&share.to_le_bytes())?;
        streams.push(stream);
    }
    let barrier = Barrier::new(lanes + 1);
    let mut whole = Vec::with_capacity(times);
    std::thread::scope(|scope| -> Result<(), Failure> {
        let send = |mut stream: TcpStream| {
            let buffer = vec![1; CHUNK.min(share as usize)];
            let mut result = Ok(());
            for _ in 0..times {
                barrier.wait();
                result = result.and_then(|()| send_share(&mut stream, &buffer, share));
                barrier.wait();
            }
            result
        };
        let threads: Vec<_> =
            streams.into_iter().map(|stream| scope.spawn(move || send(stream))).collect();
        for _ in 0..times {
            barrier.wait();
            let start = Instant::now();
            barrier.wait();
            whole.push(nanoseconds(&start.elapsed()));
        }
        threads.into_iter().try_for_each(|thread| {
            let sent = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            sent.map_err(Failure::from)
        })
    })?;
    Ok(whole)
}

fn send_share(stream: &mut TcpStream, buffer: &[u8], share: u64) -> std::io::Result<()> {
    let mut left = share;
    while left > 0 {
        let count = left.min(buffer.len() as u64) as usize;
        stream.write_all(&buffer[..count])?;
        left -= count as u64;
    }
    stream.read_exact(&mut [0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_ends_when_the_other_end_has_all_bytes() {
        for (lanes, bytes) in [(1, 1), (3, 10_000_000)] {
            let port = receive(lanes).unwrap();
            assert_eq!(send(port, lanes, bytes, 3).unwrap().len(), 3);
        }
    }
}
