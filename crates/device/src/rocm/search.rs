//! Where a shared library is looked for, and what each place said.

use std::ffi::{OsStr, c_int};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Only finds a library that the process has loaded already. Linux, of whatever C library.
const RTLD_NOLOAD: c_int = 4;

/// A library by its name without a version, and the major versions that will do, best first.
#[derive(Clone, Debug)]
pub(super) struct Search<'a> {
    /// `libamdhip64.so`.
    pub(super) name: &'a str,
    pub(super) majors: &'a [u32],
    /// Also a library whose SONAME is of none of them.
    pub(super) others: bool,
    /// A folder that comes first, with the name without a version as well: Python packages have
    /// nothing but that.
    pub(super) beside: Option<&'a Path>,
    /// Folders that the loader does not know, looked into last.
    pub(super) directories: &'a [PathBuf],
}

/// A library that was opened.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) library: Library,
    /// What it was asked for as.
    pub(super) name: PathBuf,
    /// Of its name or, where that has none, of its SONAME.
    pub(super) major: Option<u32>,
}

impl Search<'_> {
    /// One that the process has loaded, else the first that can be opened.
    ///
    /// A copy that somebody loaded from a folder of their own (PyTorch brings one) is found by its
    /// SONAME, which ends with the major version.
    ///
    /// # Errors
    /// What the loader said of each place.
    pub(super) fn open(&self) -> Result<Found, String> {
        if let Some((major, library)) = self.loaded() {
            let name = self.versioned(major).into();
            return Ok(Found { library, name, major: Some(major) });
        }
        let mut refused = Vec::new();
        for (name, major) in self.places() {
            match open(name.as_os_str(), RTLD_NOW | RTLD_LOCAL) {
                Ok(library) => {
                    // Now that it is loaded, its SONAME is known.
                    let major = major.or_else(|| self.loaded().map(|(major, _)| major));
                    if major.is_some() || self.others {
                        return Ok(Found { library, name, major });
                    }
                    // Nobody tests what its destructors do.
                    std::mem::forget(library);
                    refused.push((name, format!("its SONAME is not {}", self.wanted())));
                }
                Err(error) => refused.push((name, error.to_string())),
            }
        }
        Err(report(&refused))
    }

    fn versioned(&self, major: u32) -> String {
        format!("{}.{major}", self.name)
    }

    fn wanted(&self) -> String {
        let names: Vec<_> = self.majors.iter().map(|&major| self.versioned(major)).collect();
        names.join(" or ")
    }

    fn loaded(&self) -> Option<(u32, Library)> {
        self.majors.iter().find_map(|&major| {
            let library = open(OsStr::new(&self.versioned(major)), RTLD_NOW | RTLD_NOLOAD).ok()?;
            Some((major, library))
        })
    }

    /// Names to open, with the major versions that they tell.
    fn places(&self) -> Vec<(PathBuf, Option<u32>)> {
        let names = |unversioned: bool| {
            let versioned = self.majors.iter().map(|&major| (self.versioned(major), Some(major)));
            versioned.chain(unversioned.then(|| (self.name.to_owned(), None)))
        };
        let within = |directory: &Path, unversioned: bool| {
            names(unversioned)
                .map(|(name, major)| (directory.join(name), major))
                .collect::<Vec<_>>()
        };
        let beside = self.beside.map_or_else(Vec::new, |directory| within(directory, true));
        let named = names(self.others).map(|(name, major)| (name.into(), major));
        let directories = self.directories.iter();
        let directories = directories.flat_map(|directory| within(directory, self.others));
        beside.into_iter().chain(named).chain(directories).collect()
    }
}

fn open(name: &OsStr, flags: c_int) -> Result<Library, libloading::Error> {
    // SAFETY: opening one of AMD's libraries runs its constructors, which is what a user of the
    // `rocm` feature asks for.
    unsafe { Library::open(Some(name), flags) }
}

/// What was said, once for all places of which the same was said.
fn report(refused: &[(PathBuf, String)]) -> String {
    let mut groups: Vec<(&str, Vec<String>)> = Vec::new();
    for (place, said) in refused {
        let place = place.display().to_string();
        let said = said
            .strip_prefix(&place)
            .map_or(said.as_str(), |said| said.trim_start_matches([':', ' ']));
        match groups.iter_mut().find(|(known, _)| *known == said) {
            Some((_, places)) => places.push(place),
            None => groups.push((said, vec![place])),
        }
    }
    let mut text = String::new();
    for (said, places) in groups {
        let separator = if text.is_empty() { "" } else { "; " };
        let _ = write!(text, "{separator}{}: {said}", places.join(", "));
    }
    text
}

/// The file that holds the code at an address of this process.
pub(super) fn file_of(address: usize) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let [start, end] = [start, end].map(|number| usize::from_str_radix(number, 16).ok());
        let path = rest.find('/').map(|at| PathBuf::from(&rest[at..]))?;
        (start?..end?).contains(&address).then_some(path)
    })
}
