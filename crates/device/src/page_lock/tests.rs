//! Locks and copies, against a driver that keeps its books.

use std::fmt;

use super::*;

/// A driver that keeps its books, and sees memory a gigabyte further on.
#[derive(Debug, Default)]
struct Books {
    locked: Mutex<Vec<(u64, u64)>>,
    /// The application has locked everything.
    taken: bool,
    /// No address is given for the last byte.
    cut: Option<u64>,
    /// No address is given for that page.
    hole: Option<u64>,
    /// Memory from there on is refused.
    full: Option<u64>,
    unlocked: Mutex<Vec<u64>>,
    /// Any bytes are locked, not whole pages.
    bytes: bool,
}

const SHIFT: u64 = 1 << 30;

impl fmt::Display for Books {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("books:0")
    }
}

impl PageLocker for Books {
    fn locks_whole_pages(&self) -> bool {
        !self.bytes
    }

    fn lock(&self, host: u64, len: u64) -> Result<bool> {
        if self.full.is_some_and(|full| host >= full) {
            let (device, kind) = (self.to_string(), "pinned host");
            return Err(Error::OutOfMemory { device, kind, bytes: len });
        }
        if !self.taken {
            self.locked.lock().unwrap().push((host, len));
        }
        Ok(!self.taken)
    }

    fn unlock(&self, host: u64) -> Result<()> {
        self.locked.lock().unwrap().retain(|&(base, _)| base != host);
        self.unlocked.lock().unwrap().push(host);
        Ok(())
    }

    fn device_address(&self, host: u64) -> Result<u64> {
        match self.cut {
            Some(cut) if host >= cut => Err(refused(self, "no address")),
            _ if self.hole == Some(host - host % page(1)) => Err(refused(self, "no address")),
            _ => Ok(host + SHIFT),
        }
    }
}

fn page(number: u64) -> u64 {
    number * page_size()
}

fn locked(books: &Books) -> Vec<Extent> {
    let mut locked = books.locked.lock().unwrap().clone();
    locked.sort_unstable();
    locked
}

#[test]
fn a_range_is_cut_at_pages_of_which_it_has_a_part() {
    let books = Books::default();
    let cut = |host, len| entries(&books, host, len).collect::<Vec<_>>();
    let one = page(1);
    assert_eq!(cut(page(10), 64 * one), [(page(10), 64 * one)]);
    assert_eq!(cut(page(10), one), [(page(10), one)]);
    for (host, len) in [(page(10), 1), (page(10) + 1, one - 1), (page(10) + 1, one - 2)] {
        assert_eq!(cut(host, len), [(page(10), one)], "{len} at {host:#x}");
    }
    let two = [(page(10), one), (page(11), one)];
    for (host, len) in [(page(10) + 1, one), (page(10), one + 1), (page(11) - 1, one + 1)] {
        assert_eq!(cut(host, len), two, "{len} at {host:#x}");
    }
    let three = [(page(10), one), (page(11), 5 * one), (page(16), one)];
    assert_eq!(cut(page(11) - 1, 5 * one + 2), three);
    assert_eq!(cut(page(10) + 5, 6 * one), three);
    assert_eq!(cut(page(10) + 5, 6 * one - 5), three[..2]);
    assert_eq!(cut(page(11), 5 * one + 5), three[1..]);
}

#[test]
fn memory_of_the_same_pages_is_locked_once_and_until_its_last_user_lets_go() {
    let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
    let first = locks.lock(&books, page(10) + 5, page(3)).expect("locks");
    assert_eq!(first, page(10) + 5 + SHIFT);
    let second = locks.lock(&books, page(10) + 7, page(3)).expect("shares");
    assert_eq!(second, page(10) + 7 + SHIFT);
    let whole = [(page(10), page(1)), (page(11), page(2)), (page(13), page(1))];
    assert_eq!(locked(&books), whole);
    locks.unlock(&books, page(10) + 5, page(3)).expect("there");
    assert_eq!(locked(&books), whole);
    locks.unlock(&books, page(10) + 7, page(3)).expect("there");
    assert_eq!(locked(&books), []);
    assert!(locks.unlock(&books, page(10) + 7, page(3)).is_err());
}

#[test]
fn of_neighbours_that_share_a_page_only_that_page_stays_locked_for_the_other() {
    let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
    // Two of three pages, from the middle of the tenth on, and a few bytes of the shared one.
    let half = page(1) / 2;
    let (first, second) = (page(10) + half, page(13) + half);
    let small = page(13) + half - 2;
    let pages = [10, 11, 13, 14, 16].map(page);
    let lens = [1, 2, 1, 2, 1].map(page);
    let all: Vec<_> = pages.into_iter().zip(lens).collect();
    assert_eq!(locks.lock(&books, first, page(3) - 9), Ok(first + SHIFT));
    assert_eq!(locked(&books), all[..3]);
    assert_eq!(locks.lock(&books, second, page(3)), Ok(second + SHIFT));
    assert_eq!(locks.lock(&books, small, 2), Ok(small + SHIFT));
    assert_eq!(locked(&books), all);
    locks.unlock(&books, first, page(3) - 9).expect("there");
    assert_eq!(locked(&books), all[2..]);
    // What comes to the same addresses is locked again.
    assert_eq!(locks.lock(&books, first, page(3) - 9), Ok(first + SHIFT));
    assert_eq!(locked(&books), all);
    let missing = locks.unlock(&books, first, page(4));
    assert!(matches!(missing, Err(Error::UnknownAddress { .. })), "{missing:?}");
    locks.unlock(&books, second, page(3)).expect("there");
    assert_eq!(locked(&books), all[..3]);
    locks.unlock(&books, first, page(3) - 9).expect("there");
    assert_eq!(locked(&books), all[2..3]);
    locks.unlock(&books, small, 2).expect("there");
    assert_eq!(locked(&books), []);
}

#[test]
fn where_any_bytes_are_locked_a_range_is_one_lock_that_no_neighbour_shares() {
    let (locks, books) = (PageLocks::new(), Arc::new(Books { bytes: true, ..Books::default() }));
    let (first, second) = ((page(10) + 5, page(3)), (page(13) + 5, page(3)));
    for (host, len) in [first, second, first] {
        assert_eq!(locks.lock(&books, host, len), Ok(host + SHIFT));
    }
    assert_eq!(locked(&books), [first, second]);
    for (host, len) in [(page(10), page(4)), (page(11), 7), (page(10) + 5, page(2))] {
        assert!(locks.lock(&books, host, len).is_err(), "{len} at {host:#x}");
    }
    locks.unlock(&books, first.0, first.1).expect("there");
    assert_eq!(locked(&books), [first, second]);
    locks.unlock(&books, first.0, first.1).expect("there");
    assert_eq!(locked(&books), [second]);
    locks.unlock(&books, second.0, second.1).expect("there");
    assert_eq!(locked(&books), []);
}

#[test]
fn memory_whose_pages_are_locked_with_others_is_refused_and_nothing_changes() {
    let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
    locks.lock(&books, page(10) + 5, page(3)).expect("locks");
    let before = locked(&books);
    for (host, len) in [
        (page(11), 7),
        (page(12), page(1)),
        (page(10) + 5, page(2)),
        (page(9), page(3)),
        (page(8), page(12)),
        (page(10), page(4)),
    ] {
        let refused = locks.lock(&books, host, len).expect_err("the lock of pages 11 and 12");
        assert!(refused.to_string().contains("do not overlap"), "{refused}");
        assert_eq!(locked(&books), before, "{len} at {host:#x}");
    }
    locks.unlock(&books, page(10) + 5, page(3)).expect("there");
    locks.lock(&books, page(8), page(12)).expect("nothing is in its way");
    assert_eq!(locked(&books), [(page(8), page(12))]);
}

#[test]
fn neighbours_that_a_device_sees_apart_are_refused_and_nothing_changes() {
    let cut = Arc::new(Books { cut: Some(page(12)), ..Books::default() });
    let locks = PageLocks::new();
    locks.lock(&cut, page(10), page(1) + 9).expect("locks");
    let before = locked(&cut);
    assert_eq!(before, [(page(10), page(1)), (page(11), page(1))]);
    for len in [page(1), page(3)] {
        let refused = locks.lock(&cut, page(11) + 9, len);
        assert!(matches!(refused, Err(Error::Call { .. })), "{refused:?}");
        assert_eq!(locked(&cut), before);
    }
    locks.unlock(&cut, page(10), page(1) + 9).expect("there");
    assert_eq!(locked(&cut), []);
}

#[test]
fn long_memory_is_locked_in_pieces_which_end_together_also_when_one_has_no_address() {
    let len = 2 * PIECE + page(1);
    let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
    assert_eq!(locks.lock(&books, page(1), len), Ok(page(1) + SHIFT));
    assert_eq!(books.locked.lock().unwrap().len(), 3);
    locks.unlock(&books, page(1), len).expect("there");
    assert_eq!(*books.locked.lock().unwrap(), []);
    let cut = Arc::new(Books { cut: Some(page(1) + PIECE), ..Books::default() });
    assert!(locks.lock(&cut, page(1), len).is_err());
    assert_eq!(*cut.locked.lock().unwrap(), []);
    assert!(locks.unlock(&cut, page(1), len).is_err(), "nothing stays in the table");
}

#[test]
fn b48_a_piece_that_is_refused_takes_those_before_it_back_the_last_first() {
    let len = 5 * PIECE;
    for refused in 0..5 {
        let full = Some(page(1) + refused * PIECE);
        let (locks, books) = (PageLocks::new(), Arc::new(Books { full, ..Books::default() }));
        let said = locks.lock(&books, page(1), len);
        let what =
            Error::OutOfMemory { device: "books:0".into(), kind: "pinned host", bytes: PIECE };
        assert_eq!(said, Err(what));
        assert_eq!(*books.locked.lock().unwrap(), []);
        let back: Vec<_> = (0..refused).rev().map(|piece| page(1) + piece * PIECE).collect();
        assert_eq!(*books.unlocked.lock().unwrap(), back);
    }
}

#[test]
fn a_lock_of_the_applications_own_is_used_and_left_alone() {
    let books = Arc::new(Books { taken: true, ..Books::default() });
    let locks = PageLocks::new();
    assert_eq!(locks.lock(&books, page(1), 9), Ok(page(1) + SHIFT));
    books.locked.lock().unwrap().push((page(1), page(1)));
    locks.unlock(&books, page(1), 9).expect("there");
    assert_eq!(*books.locked.lock().unwrap(), [(page(1), page(1))]);
}

#[test]
fn memory_of_which_the_application_has_locked_but_a_part_is_refused() {
    let hole = Some(page(14));
    let books = Arc::new(Books { taken: true, hole, ..Books::default() });
    let locks = PageLocks::new();
    for (host, len) in [(page(10), page(9)), (page(10) + 5, page(9)), (page(13), page(2) - 1)] {
        let refused = locks.lock(&books, host, len).expect_err("page 14 is not locked");
        assert!(refused.to_string().contains("all of them, or none"), "{refused}");
        assert!(locks.unlock(&books, host, len).is_err(), "nothing stays in the table");
    }
    for (host, len) in [(page(10), page(4)), (page(15), page(4))] {
        assert_eq!(locks.lock(&books, host, len), Ok(host + SHIFT));
    }
}

/// A driver that copies nothing over a border and keeps its books: what it was asked for.
fn copies(
    locks: &PageLocks<Books>,
    sides: [u64; 2],
    len: u64,
    borders: &[u64],
) -> (Result<(), &'static str>, Vec<[u64; 3]>, usize) {
    let (done, calls) = (Mutex::new(Vec::new()), Mutex::new(0));
    let copied = locks.copy(
        sides,
        len,
        |&said| said == "refused",
        |dst, src, len| {
            *calls.lock().unwrap() += 1;
            let inside = |side: u64| borders.iter().any(|&at| side < at && at < side + len);
            if inside(dst) || inside(src) {
                return Err("refused");
            }
            done.lock().unwrap().push([dst, src, len]);
            Ok(())
        },
    );
    (copied, done.into_inner().unwrap(), calls.into_inner().unwrap())
}

#[test]
fn a_copy_that_is_refused_is_cut_at_the_borders_of_locks_and_no_other_one() {
    let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
    let device = page(1000);
    let unlocked = [device, page(10) + 5];
    assert_eq!(copies(&locks, unlocked, 9, &[page(10) + 9]), (Err("refused"), vec![], 1));
    locks.lock(&books, page(10) + 5, page(3)).expect("locks");
    // By either name, at either side.
    let (head, page_2) = (page(1) - 5, page(2));
    for host in [page(10) + 5, page(10) + 5 + SHIFT] {
        let base = host - 5;
        let borders = [base + page(1), base + page(3), base + page(4)];
        let parts = [[0, head], [head, page_2], [head + page_2, 5]];
        let part = |dst, src| parts.map(|[from, len]| [dst + from, src + from, len]).to_vec();
        let (copied, done, _) = copies(&locks, [device, host], page(3), &borders);
        assert_eq!((copied, done), (Ok(()), part(device, host)));
        let (copied, done, _) = copies(&locks, [host, device], page(3), &borders);
        assert_eq!((copied, done), (Ok(()), part(host, device)));
        // One call where no border is.
        let inside = [device, base + page(1)];
        assert_eq!(copies(&locks, inside, page(2), &borders).2, 1);
        // And from a lock into memory of nobody's.
        let (copied, done, _) = copies(&locks, [device, base + page(3)], page(2), &borders);
        let parts =
            vec![[device, base + page(3), page(1)], [device + page(1), base + page(4), page(1)]];
        assert_eq!((copied, done), (Ok(()), parts));
    }
    locks.unlock(&books, page(10) + 5, page(3)).expect("there");
    assert_eq!(copies(&locks, unlocked, 9, &[page(10) + 9]), (Err("refused"), vec![], 1));
}

#[test]
fn a_copy_that_is_wrong_stays_so_in_parts() {
    let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
    locks.lock(&books, page(10) + 5, page(3)).expect("locks");
    let sides = [page(1000), page(10) + 5];
    let nonsense = locks.copy([u64::MAX - 9, 3], u64::MAX, |_| true, |_, _, _| Err("refused"));
    assert_eq!(nonsense, Err("refused"));
    for (said, most) in [("refused", 3), ("lost", 1)] {
        let calls = Mutex::new(0);
        let copied = locks.copy(
            sides,
            page(3),
            |&said| said == "refused",
            |_, _, _| {
                *calls.lock().unwrap() += 1;
                Err(said)
            },
        );
        assert_eq!(copied, Err(said));
        assert!(calls.into_inner().unwrap() <= most);
    }
}

#[test]
fn memory_that_the_application_has_locked_is_cut_only_where_a_copy_is_refused() {
    let books = Arc::new(Books { taken: true, ..Books::default() });
    let locks = PageLocks::new();
    locks.lock(&books, page(10) + 5, page(4096)).expect("the application's");
    // Of two locks.
    let border = page(1234);
    let sides = [page(10_000), page(10) + 5];
    let (copied, done, calls) = copies(&locks, sides, page(4096), &[border]);
    assert_eq!(copied, Ok(()));
    assert!(calls < 30, "{calls} calls");
    assert_eq!(done.iter().map(|[.., len]| len).sum::<u64>(), page(4096));
    assert!(done.iter().any(|&[_, src, _]| src == border), "{done:?}");
}

/// As [`copies`], of rows: blocks as they are, and parts of single rows as blocks of one.
fn blocks(
    locks: &PageLocks<Books>,
    rows: Rows,
    borders: &[u64],
) -> (Result<(), &'static str>, Vec<Rows>, usize) {
    let (done, calls) = (Mutex::new(Vec::new()), Mutex::new(0));
    let block = |rows: Rows| {
        *calls.lock().unwrap() += 1;
        let refused = [(rows.dst, rows.dst_pitch), (rows.src, rows.src_pitch)];
        let refused = refused.map(|(side, pitch)| {
            let end = side + (rows.count - 1) * pitch + rows.len;
            borders.iter().any(|&at| side < at && at < end)
        });
        if refused.contains(&true) {
            return Err("refused");
        }
        done.lock().unwrap().push(rows);
        Ok(())
    };
    let copied = locks.copy_rows(
        rows,
        |&said| said == "refused",
        |dst, src, len| block(Rows { src, dst, len, count: 1, ..rows }),
        block,
    );
    (copied, done.into_inner().unwrap(), calls.into_inner().unwrap())
}

#[test]
fn rows_that_are_refused_are_few_blocks_and_only_a_row_with_a_border_inside_is_cut() {
    let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
    locks.lock(&books, page(10) + 5, page(300)).expect("locks");
    let device = page(1000);
    let borders = [page(11), page(310), page(311)];
    // Rows of 100 bytes that lie 256 apart: inside of one, in a gap, and where one begins.
    for (offset, inside) in [(60, true), (200, false), (0, false)] {
        let first = page(11) - 256 * 3 - offset;
        let host =
            Rows { src: first, dst: device, len: 100, src_pitch: 256, dst_pitch: 100, count: 64 };
        let other = Rows { src: host.dst, dst: host.src, src_pitch: 100, dst_pitch: 256, ..host };
        for rows in [host, other] {
            let (copied, done, calls) = blocks(&locks, rows, &borders);
            assert_eq!(copied, Ok(()));
            assert!(calls <= 9, "{calls} calls");
            assert_eq!(
                done.iter().filter(|block| block.len < 100).count(),
                2 * usize::from(inside)
            );
            assert!(done.len() <= if inside { 4 } else { 2 }, "{done:?}");
            // All of it, once and in its place.
            let mut bytes: Vec<_> = done
                .iter()
                .flat_map(|block| {
                    (0..block.count).flat_map(move |row| {
                        (0..block.len).map(move |at| {
                            (
                                block.src + row * block.src_pitch + at,
                                block.dst + row * block.dst_pitch + at,
                            )
                        })
                    })
                })
                .collect();
            bytes.sort_unstable();
            let expected: Vec<_> = (0..64 * 100)
                .map(|at| (at / 100, at % 100))
                .map(|(row, at)| {
                    (rows.src + row * rows.src_pitch + at, rows.dst + row * rows.dst_pitch + at)
                })
                .collect();
            assert_eq!(bytes, expected);
        }
        // One call where no border is, and what is wrong elsewhere stays so.
        let clear = Rows { src: page(20), ..host };
        assert_eq!(blocks(&locks, clear, &borders), (Ok(()), vec![clear], 1));
        assert_eq!(blocks(&locks, clear, &[page(20) + 300]), (Err("refused"), vec![], 1));
    }
}

#[test]
fn copies_of_long_memory_of_another_process_are_cut_where_its_pieces_meet() {
    static LOCKS: PageLocks<Books> = PageLocks::new();
    let books = Arc::new(Books::default());
    let len = PIECE + page(1) + 7;
    // No page of it is touched.
    let file = rustix::fs::memfd_create("long", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
    rustix::fs::ftruncate(&file, len).expect("sparse");
    let (addr, file) = LockedFile::open(&LOCKS, &books, file, len).expect("maps");
    assert_eq!(books.locked.lock().unwrap().len(), 2);
    let border = addr + PIECE;
    let (copied, done, _) = copies(&LOCKS, [page(1), border - 9], 20, &[border]);
    assert_eq!(copied, Ok(()));
    assert_eq!(done, [[page(1), border - 9, 9], [page(1) + 9, border, 11]]);
    file.close().expect("unlocks");
    assert_eq!(*books.locked.lock().unwrap(), []);
    assert_eq!(copies(&LOCKS, [page(1), border - 9], 20, &[border]).0, Err("refused"));
}
