//! What stands between C and this library: panics, forks, nulls, sizes and texts.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvferry_engine::device::is_fork;

use super::numbers::{FORKED, INTERNAL, OK};
use super::status::Refusal;
use super::types::{Status, Versioned};

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs what a function of the table does; keeps the reason of a refusal for `last_error`.
pub(super) fn call(body: impl FnOnce() -> Result<(), Refusal>) -> Status {
    if is_fork() {
        set_last_error(
            "kvferry was used before this process was forked, and no driver survives that: use it in \
             the parent, or start the child with exec"
                .into(),
        );
        return FORKED;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => OK,
        Ok(Err(Refusal { status, text })) => {
            set_last_error(text);
            status
        }
        Err(panic) => {
            set_last_error(format!("kvferry failed inside: {}", message(&*panic)));
            INTERNAL
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

pub(super) fn set_last_error(text: String) {
    // A thread that is ending has none.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
}

pub(super) fn last_error() -> String {
    LAST_ERROR.try_with(|last| last.borrow().clone()).unwrap_or_default()
}

/// Copies a text to C, shortened if it must be; returns the bytes that all of it needs.
///
/// # Safety
/// `to` points to `size` bytes, or `size` is 0.
pub(super) unsafe fn put_text(text: &str, to: *mut c_char, size: usize) -> usize {
    if !to.is_null() && size > 0 {
        let mut length = text.len().min(size - 1);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        // SAFETY: `length` and the zero behind it fit into `size` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast::<u8>(), length);
            to.add(length).write(0);
        }
    }
    text.len() + 1
}

/// As [`put_text`], for functions that return a status.
///
/// # Safety
/// As [`put_text`]; `needed` is null or may be written.
pub(super) unsafe fn put_needed(
    text: &str,
    to: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> Result<(), Refusal> {
    if to.is_null() && size > 0 {
        return Err(Refusal::invalid(format!("text is NULL, for {size} bytes")));
    }
    if !needed.is_null() {
        out("needed", needed)?;
    }
    // SAFETY: the caller's contract.
    let needs = unsafe { put_text(text, to, size) };
    if !needed.is_null() {
        // SAFETY: aligned, as was checked; the rest is the caller's contract.
        unsafe { needed.write(needs) };
    }
    match needs <= size || size == 0 && !needed.is_null() {
        true => Ok(()),
        false => Err(Refusal::invalid(format!("the text needs {needs} bytes, {size} were given"))),
    }
}

/// A text from C; none for null.
///
/// # Safety
/// Null, or a text with a zero at its end that nobody changes meanwhile.
pub(super) unsafe fn text<'a>(
    what: &'static str,
    from: *const c_char,
) -> Result<Option<&'a str>, Refusal> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    let text = unsafe { CStr::from_ptr(from) };
    let text = text.to_str().map_err(|_| Refusal::invalid(format!("{what} is not UTF-8")))?;
    Ok(Some(text))
}

/// A list from C.
///
/// # Safety
/// If it is not null, `count` entries that nobody changes meanwhile.
pub(super) unsafe fn list<'a, T>(
    what: &'static str,
    from: *const T,
    count: usize,
) -> Result<&'a [T], Refusal> {
    if count == 0 {
        return Ok(&[]);
    }
    if from.is_null() {
        return Err(Refusal::invalid(format!("{what} is NULL, for {count} entries")));
    }
    if !from.is_aligned() {
        return Err(Refusal::invalid(format!("{what} is misaligned")));
    }
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Refusal::invalid(format!("{what}: {count} entries fit in no memory")));
    }
    // SAFETY: not null, aligned, of a size that can be; the rest is the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(from, count) })
}

/// Where a result goes.
///
/// # Safety
/// Null, or memory for one `T`.
pub(super) unsafe fn put<T>(what: &'static str, to: *mut T, value: T) -> Result<(), Refusal> {
    out(what, to)?;
    // SAFETY: not null, aligned; the rest is the caller's contract.
    unsafe { to.write(value) };
    Ok(())
}

/// Refuses a place for a result that cannot be one, before anything is done.
pub(super) fn out<T>(what: &'static str, to: *mut T) -> Result<(), Refusal> {
    if to.is_null() || !to.is_aligned() {
        return Err(Refusal::invalid(format!("{what}: no place for the result")));
    }
    Ok(())
}

/// A structure that says its size; zeros for null and for fields that the caller does not know. A
/// newer caller's fields must be zero.
///
/// # Safety
/// Null, or as many bytes as its first field says.
pub(super) unsafe fn structure<T: Versioned>(
    what: &'static str,
    from: *const T,
) -> Result<T, Refusal> {
    // SAFETY: all bytes zero is a `T`, by the trait's contract.
    let mut known: T = unsafe { std::mem::zeroed() };
    if from.is_null() {
        return Ok(known);
    }
    // SAFETY: the caller's contract: there are at least these 8 bytes.
    let size = size_of_caller(what, unsafe { from.cast::<u64>().read_unaligned() })?;
    let ours = size_of::<T>();
    // SAFETY: both have the smaller size, and are plain bytes.
    unsafe {
        let to = (&raw mut known).cast::<u8>();
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to, size.min(ours));
    }
    for at in ours..size {
        // SAFETY: inside what the caller said.
        if unsafe { from.cast::<u8>().add(at).read() } != 0 {
            return Err(Refusal::invalid(format!(
                "{what}: a field at byte {at} is set, and this library knows {ours} bytes: it is \
                 older than the header"
            )));
        }
    }
    Ok(known)
}

/// Fills in as much of a structure as the caller knows.
///
/// # Safety
/// Null, or as many bytes as its first field says.
pub(super) unsafe fn put_structure<T: Versioned>(
    what: &'static str,
    to: *mut T,
    value: &T,
) -> Result<(), Refusal> {
    out(what, to)?;
    // SAFETY: the caller's contract.
    let size = size_of_caller(what, unsafe { to.cast::<u64>().read() })?;
    const SIZE: usize = size_of::<u64>();
    // SAFETY: both have the smaller size; the caller's own size stays as it is.
    unsafe {
        let from = (value as *const T).cast::<u8>().add(SIZE);
        std::ptr::copy_nonoverlapping(
            from,
            to.cast::<u8>().add(SIZE),
            size.min(size_of::<T>()) - SIZE,
        );
    }
    Ok(())
}

/// Far above any structure of this ABI, and far below what a forgotten field holds.
const LARGEST: u64 = 4096;

fn size_of_caller(what: &'static str, size: u64) -> Result<usize, Refusal> {
    match size {
        // Fields of 8 bytes are there whole or not at all.
        8..=LARGEST if size.is_multiple_of(8) => Ok(size as usize),
        _ => Err(Refusal::invalid(format!("{what}: struct_size is {size}, not sizeof of it"))),
    }
}
