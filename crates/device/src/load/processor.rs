//! Loads for the processor, one thread for each; a decoder is one thread alone.

use std::hint::black_box;

use super::*;

/// Rows and columns of the matrices.
const SIDE: usize = 96;
const MULTIPLY_ADDS: u32 = 20_000;
/// Eight-byte words of a thread's buffer: 8 MiB, more than its own caches hold.
const WORDS: usize = 1 << 20;

/// What a decode step reads: more than a core's own caches hold, and a step of a millisecond or
/// so, whatever the build.
const DECODE_WORDS: usize = 600_000;

pub(super) fn bodies(kind: LoadKind) -> (String, Vec<Body>) {
    // A decode is one step after the other, so it has one thread.
    let threads = match kind {
        LoadKind::Decode => 1,
        _ => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let step = match kind {
        LoadKind::Gemm => format!("float product of {SIDE} x {SIDE} by {SIDE} x {SIDE}"),
        LoadKind::Blocks => format!("{MULTIPLY_ADDS} multiply-adds"),
        LoadKind::Memory => format!("reads and writes {} MB", WORDS * 8 / 1_000_000),
        LoadKind::Decode => {
            format!("reads {:.1} MB of weights", DECODE_WORDS as f64 * 8.0 / 1e6)
        }
    };
    let body = || -> Body {
        Box::new(move |shared| {
            match kind {
                LoadKind::Gemm => {
                    let (a, b) = (vec![0.5; SIDE * SIDE], vec![0.25; SIDE * SIDE]);
                    let mut c = vec![0.0; SIDE * SIDE];
                    repeat(shared, || product(&a, &b, black_box(&mut c)));
                }
                LoadKind::Blocks => {
                    let mut point = (1.0, 0.5);
                    repeat(shared, || point = turn(black_box(point)));
                }
                LoadKind::Decode => {
                    let weights = vec![3_u64; DECODE_WORDS];
                    repeat(shared, || {
                        let sum = |sum: u64, word: &u64| sum.wrapping_add(*word);
                        black_box(black_box(&weights).iter().fold(0, sum));
                    });
                }
                LoadKind::Memory => {
                    let mut words = vec![0_u64; WORDS];
                    repeat(shared, || {
                        for word in black_box(&mut words) {
                            *word = word.wrapping_add(1);
                        }
                    });
                }
            }
            Ok(())
        })
    };
    let about = match threads {
        1 => format!("{step}, on one processor"),
        _ => format!("{step}, on each of {threads} processors"),
    };
    (about, (0..threads).map(|_| body()).collect())
}

fn repeat(shared: &Shared, mut step: impl FnMut()) {
    while !shared.stopping() {
        let start = shared.timing().then(Instant::now);
        step();
        shared.add(1, start.map(|start| start.elapsed()));
    }
}

/// Row by row, so that the inner loop runs along memory.
fn product(a: &[f32], b: &[f32], c: &mut [f32]) {
    for (row, sums) in c.chunks_exact_mut(SIDE).enumerate() {
        sums.fill(0.0);
        for (depth, others) in b.chunks_exact(SIDE).enumerate() {
            let factor = a[row * SIDE + depth];
            for (sum, other) in sums.iter_mut().zip(others) {
                *sum += factor * other;
            }
        }
    }
}

/// Turns a point about the origin, so that the numbers neither grow nor come to rest.
fn turn((mut x, mut y): (f32, f32)) -> (f32, f32) {
    for _ in 0..MULTIPLY_ADDS / 2 {
        x -= 0.1 * y;
        y += 0.1 * x;
    }
    (x, y)
}
