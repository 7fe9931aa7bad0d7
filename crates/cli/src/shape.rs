//! Named transfer shapes: what real workloads hand over in one request.
//!
//! The table is `data/shapes.jsonl`, embedded, one JSON object a line. A shape says how many
//! pieces of which length and how they lie in memory; `Layout::for_shape` turns it into offsets.

use std::str::FromStr;
use std::sync::LazyLock;

use serde::Deserialize;

/// One line of `data/shapes.jsonl`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Short identifier, such as `R3`.
    pub id: String,
    /// Spoken name, such as `head-sliced`; not every shape has one.
    pub name: Option<String>,
    /// Runs of pieces of equal length.
    pub parts: Vec<Part>,
    /// How the pieces lie in the two buffers.
    pub order: Order,
    /// Bytes between neighbouring slots of the source; 0 packs each part at its own length.
    pub src_stride: u64,
    /// Bytes between neighbouring slots of the destination; 0 packs each part at its own length.
    pub dst_stride: u64,
    /// Added to every source offset, to take the pieces off their alignment.
    #[serde(default)]
    pub src_shift: u64,
    /// Added to every destination offset, to take the pieces off their alignment.
    #[serde(default)]
    pub dst_shift: u64,
    /// Bytes that packed slots are rounded up to, at most the reserve of a `Layout`.
    pub align: u64,
    /// The directions that the workload moves in, as the source of the shape words them.
    pub dir: String,
    /// Number of pieces.
    pub descriptors: u64,
    /// Sum of the lengths of all pieces.
    pub bytes: u64,
}

/// A run of pieces of one length; `[count, length]` in the file.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct Part {
    /// Number of pieces.
    pub count: u64,
    /// Bytes of each piece.
    pub len: u64,
}

/// How the pieces of a shape lie in the two buffers.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Slots in random order on both sides, as pages from a free list.
    Scatter,
    /// As `Scatter`, and the list alternates between the parts.
    ScatterInterleaved,
    /// Lengths shuffled over the list; each side packs them in a random order of its own.
    ShuffledMix,
    /// Each stride is a page of equal slots: a page's pieces fill it slot by slot, and the pages
    /// lie in random order on both sides.
    SlotInPage,
    /// Slots in list order on both sides.
    Strided,
    /// Random slots at the source, list order at the destination.
    ScatterToPacked,
    /// List order at the source, random slots at the destination.
    StridedToScatter,
    /// Random slots out of 8192 at the source, list order at the destination.
    #[serde(rename = "scatter_of_8192_blocks")]
    ScatterOf8192Blocks,
    /// End to end inside one segment at the source, separate at the destination.
    OneSegment,
}

impl Shape {
    /// Every known shape, in the order of the file.
    pub fn all() -> &'static [Shape] {
        &SHAPES
    }

    /// The name to show: the spoken one where there is one, else the identifier.
    pub fn label(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.id)
    }

    fn answers_to(&self, word: &str) -> bool {
        self.words().any(|known| known.eq_ignore_ascii_case(word))
    }

    fn words(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.id.as_str()).chain(self.name.as_deref())
    }
}

/// The shapes that a user asked for: identifiers or names, `daily` or `all`, separated by commas,
/// in any case. A shape that is named twice runs once, where it was named first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The shapes, in the order asked for.
    pub shapes: Vec<&'static Shape>,
    /// The user asked for `all`, so a shape that does not fit in memory is skipped, not an error.
    pub all: bool,
}

impl FromStr for Selection {
    type Err = UnknownShape;

    fn from_str(text: &str) -> Result<Self, UnknownShape> {
        let mut selection = Self { shapes: Vec::new(), all: false };
        for word in text.split(',').map(str::trim) {
            if word.eq_ignore_ascii_case(ALL) {
                selection.all = true;
                Shape::all().iter().for_each(|shape| selection.add(shape));
            } else if word.eq_ignore_ascii_case(DAILY) {
                for id in DAILY_IDS {
                    selection.add(find(id)?);
                }
            } else {
                selection.add(find(word)?);
            }
        }
        Ok(selection)
    }
}

impl Selection {
    fn add(&mut self, shape: &'static Shape) {
        if !self.shapes.contains(&shape) {
            self.shapes.push(shape);
        }
    }
}

/// A word of a selection that names no shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no shape {word:?}{}; known: {}", hint(.nearest), known())]
pub struct UnknownShape {
    /// What the user wrote.
    pub word: String,
    /// The known word that resembles it most, if one does.
    pub nearest: Option<&'static str>,
}

const ALL: &str = "all";
const DAILY: &str = "daily";
const DAILY_IDS: [&str; 16] = [
    "R1", "R2", "R3", "R4", "R5", "R6", "W01a", "W01b", "W01c", "W03", "W05b", "W06", "W07a",
    "W07b", "W14", "W18",
];

static SHAPES: LazyLock<Vec<Shape>> = LazyLock::new(|| {
    include_str!("../data/shapes.jsonl")
        .lines()
        .map(|line| {
            serde_json::from_str(line)
                .expect("the file is part of the build and a test reads all of it")
        })
        .collect()
});

fn find(word: &str) -> Result<&'static Shape, UnknownShape> {
    Shape::all()
        .iter()
        .find(|shape| shape.answers_to(word))
        .ok_or_else(|| UnknownShape { word: word.to_owned(), nearest: nearest(word) })
}

/// The known word that the fewest edits lead to; none where more than a third would have to change.
fn nearest(word: &str) -> Option<&'static str> {
    let word = word.to_ascii_lowercase();
    let limit = (word.chars().count() / 3).max(1);
    Shape::all()
        .iter()
        .flat_map(Shape::words)
        .chain([DAILY, ALL])
        .map(|known| (edits(&word, &known.to_ascii_lowercase()), known))
        .filter(|&(distance, _)| distance <= limit)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, known)| known)
}

/// Levenshtein distance, one row of the table at a time.
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.chars().count()).collect();
    for (deleted, from) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = deleted + 1;
        for (column, to) in to.chars().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[row.len() - 1]
}

fn hint(nearest: &Option<&str>) -> String {
    nearest.map(|known| format!(", did you mean {known:?}?")).unwrap_or_default()
}

fn known() -> String {
    let shapes = Shape::all().iter().map(|shape| match &shape.name {
        Some(name) => format!("{} ({name})", shape.id),
        None => shape.id.clone(),
    });
    shapes.chain([DAILY, ALL].map(str::to_owned)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn ids(text: &str) -> Vec<&'static str> {
        let selection: Selection = text.parse().unwrap();
        selection.shapes.iter().map(|shape| shape.id.as_str()).collect()
    }

    #[test]
    fn every_line_of_the_file_states_its_own_sums() {
        for shape in Shape::all() {
            let descriptors: u64 = shape.parts.iter().map(|part| part.count).sum();
            let bytes: u64 = shape.parts.iter().map(|part| part.count * part.len).sum();
            assert_eq!((descriptors, bytes), (shape.descriptors, shape.bytes), "{}", shape.id);
            assert!(shape.align.is_power_of_two(), "{}", shape.id);
        }
    }

    #[test]
    fn no_two_shapes_answer_to_the_same_word() {
        let mut seen = HashSet::from([DAILY.to_owned(), ALL.to_owned()]);
        for word in Shape::all().iter().flat_map(Shape::words) {
            assert!(seen.insert(word.to_ascii_lowercase()), "{word}");
        }
    }

    #[test]
    fn ids_and_names_are_found_in_any_case_and_in_the_order_asked() {
        assert_eq!(ids("r3, DSA-index,w05B"), ["R3", "R2", "W05b"]);
    }

    #[test]
    fn a_shape_named_twice_runs_once() {
        assert_eq!(ids("R6,fragments-4k,R6"), ["R6"]);
        assert_eq!(ids("w18,daily").len(), DAILY_IDS.len());
    }

    #[test]
    fn daily_is_the_published_list_and_all_is_every_line() {
        assert_eq!(ids("daily"), DAILY_IDS);
        let all: Selection = "ALL".parse().unwrap();
        assert_eq!(all.shapes.len(), Shape::all().len());
        assert!(all.all && !"daily".parse::<Selection>().unwrap().all);
    }

    #[test]
    fn an_unknown_word_is_refused_with_the_nearest_and_every_known_one() {
        let error = "R1,fragmnts-4k".parse::<Selection>().unwrap_err();
        assert_eq!(error.nearest, Some("fragments-4k"));
        let message = error.to_string();
        assert!(message.starts_with(
            r#"no shape "fragmnts-4k", did you mean "fragments-4k"?; known: R1 (mla-slots), "#
        ));
        for shape in Shape::all() {
            assert!(message.contains(&shape.id), "{} is missing in {message}", shape.id);
        }
        assert!(message.ends_with("daily, all"));
    }

    #[test]
    fn a_word_that_resembles_nothing_gets_no_hint() {
        for text in ["", "R1,,R2", "quadrature"] {
            assert_eq!(text.parse::<Selection>().unwrap_err().nearest, None, "{text:?}");
        }
    }

    #[test]
    fn the_misaligned_shape_differs_from_its_model_only_in_the_shifts() {
        let aligned = find("R6").unwrap();
        let misaligned = find("fragments-4k-misaligned").unwrap();
        assert_eq!((misaligned.src_shift, misaligned.dst_shift), (5, 11));
        let same = Shape {
            id: aligned.id.clone(),
            name: aligned.name.clone(),
            src_shift: 0,
            dst_shift: 0,
            ..misaligned.clone()
        };
        assert_eq!(&same, aligned);
    }
}
