//! Where a shared library is looked for, and what each place said.

use std::error::Error;
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
                Err(error) => refused.push((name, said(&error))),
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

/// The loader's own words, which libloading keeps as the source.
pub(super) fn said(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocm::fake::build;

    fn search<'a>(name: &'a str, directories: &'a [PathBuf]) -> Search<'a> {
        Search { name, majors: &[7, 6, 5], others: true, beside: None, directories }
    }

    #[test]
    fn what_every_place_said_is_told_once() {
        let directory = tempfile::tempdir().expect("a folder");
        let file = directory.path().join("libkvferry_text.so.6");
        fs::write(&file, "no library").expect("room");
        let directories = [directory.path().to_owned()];
        let reason = search("libkvferry_text.so", &directories).open().expect_err("no library");
        for place in ["libkvferry_text.so.7, ", "libkvferry_text.so.5, ", "libkvferry_text.so, "] {
            assert!(reason.contains(place), "{place}: {reason}");
        }
        let missing = "cannot open shared object file: No such file or directory";
        assert_eq!(reason.matches(missing).count(), 1, "{reason}");
        let text = format!("{}: file too short", file.display());
        let other = format!("{}: invalid ELF header", file.display());
        assert!(reason.contains(&text) || reason.contains(&other), "{reason}");
    }

    #[test]
    fn a_file_that_does_not_open_does_not_hide_the_next() {
        let directory = tempfile::tempdir().expect("a folder");
        fs::write(directory.path().join("libkvferry_next.so.7"), "no library").expect("room");
        let name = "libkvferry_next.so.6";
        let Some(()) = build(directory.path(), name, name, "int next;") else { return };
        let directories = [directory.path().to_owned()];
        let found = search("libkvferry_next.so", &directories).open().expect("the second");
        assert_eq!((found.name, found.major), (directory.path().join(name), Some(6)));
    }

    #[test]
    fn newer_versions_come_first() {
        let directory = tempfile::tempdir().expect("a folder");
        for major in [5, 7, 6] {
            let name = format!("libkvferry_newest.so.{major}");
            let Some(()) = build(directory.path(), &name, &name, "int newest;") else { return };
        }
        let directories = [directory.path().to_owned()];
        let found = search("libkvferry_newest.so", &directories).open().expect("three of them");
        assert_eq!(found.major, Some(7));
    }

    #[test]
    fn a_copy_that_the_process_has_loaded_comes_before_all_others() {
        let [own, others] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        // As a Python package brings it: its SONAME has a version, its file has none.
        let older = "libkvferry_loaded.so.6";
        let Some(()) = build(own.path(), "libkvferry_loaded.so", older, "int loaded = 6;") else {
            return;
        };
        let newer = "libkvferry_loaded.so.7";
        let Some(()) = build(others.path(), newer, newer, "int loaded = 7;") else { return };
        let application = open(own.path().join("libkvferry_loaded.so").as_os_str(), RTLD_NOW);
        let _application = application.expect("it was built");
        let search = Search { beside: Some(others.path()), ..search("libkvferry_loaded.so", &[]) };
        let found = search.open().expect("two of them");
        assert_eq!((found.name, found.major), (older.into(), Some(6)));
        // SAFETY: the source above says that it is an int.
        let loaded = unsafe { **found.library.get::<*const c_int>(b"loaded\0").expect("defined") };
        assert_eq!(loaded, 6);
    }

    #[test]
    fn a_name_without_a_version_leads_to_that_of_its_soname_or_is_refused() {
        let directory = tempfile::tempdir().expect("a folder");
        let file = "libkvferry_plain.so";
        let Some(()) = build(directory.path(), file, "libkvferry_plain.so.6", "int plain;") else {
            return;
        };
        let majors = |majors: &'static [u32]| Search {
            name: file,
            majors,
            others: false,
            beside: Some(directory.path()),
            directories: &[],
        };
        let refused = majors(&[7]).open().expect_err("of another version");
        assert!(refused.contains("its SONAME is not libkvferry_plain.so.7"), "{refused}");
        assert_eq!(majors(&[6]).open().expect("of this version").major, Some(6));
    }

    #[test]
    fn the_file_of_this_code_is_this_program() {
        let own = std::env::args_os().next().expect("a name");
        let file = file_of(file_of as *const () as usize).expect("it is mapped");
        assert_eq!(file.file_name(), Path::new(&own).file_name());
        assert_eq!(file_of(1), None);
    }
}
