//! Charts of what a bench found, as one SVG file: bars, lines and maps, one below the other.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::Failure;

/// One chart.
#[derive(Clone, Debug)]
pub(crate) enum Panel {
    Bars(Bars),
    Lines(Lines),
    Map(Map),
}

/// Groups of bars side by side, one of each series in a group; what was not measured is not drawn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    pub(crate) groups: Vec<String>,
    pub(crate) series: Vec<(String, Vec<Option<f64>>)>,
}

/// Curves over a number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lines {
    pub(crate) title: String,
    pub(crate) across: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) series: Vec<(String, Vec<(f64, f64)>)>,
}

/// Numbers of 0 to 1 in the fields of a table, by column and row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Map {
    pub(crate) title: String,
    pub(crate) across: &'static str,
    pub(crate) along: &'static str,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<String>,
    pub(crate) fields: Vec<(usize, usize, f64)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 1000;
const PANEL_HEIGHT: u32 = 400;
/// The width of a chart with the room for its legend, against that without.
const BESIDE: f64 = 1.15;
/// Told apart by people who see few colours, too.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
    RGBColor(0, 0, 0),
];

/// Draws the charts into a file.
pub(crate) fn draw(path: &Path, panels: &[Panel]) -> Result<(), Failure> {
    let height = PANEL_HEIGHT * panels.len().max(1) as u32;
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        let all = || -> Result<(), Box<dyn std::error::Error + '_>> {
            root.fill(&WHITE)?;
            for (panel, area) in panels.iter().zip(root.split_evenly((panels.len().max(1), 1))) {
                match panel {
                    Panel::Bars(bars) => bars.draw(&area)?,
                    Panel::Lines(lines) => lines.draw(&area)?,
                    Panel::Map(map) => map.draw(&area)?,
                }
            }
            root.present()?;
            Ok(())
        };
        all().map_err(|error| format!("cannot draw: {error}"))?;
    }
    Ok(std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))?)
}

type Drawn = Result<(), Box<dyn std::error::Error>>;

fn colour(series: usize) -> RGBColor {
    COLOURS[series % COLOURS.len()]
}

/// The largest of all, and a little more.
fn top(values: impl Iterator<Item = f64>) -> f64 {
    let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
    if most > 0.0 { most * 1.1 } else { 1.0 }
}

impl Bars {
    fn draw(&self, area: &Area<'_>) -> Drawn {
        let all = || self.series.iter().flat_map(|(_, values)| values).flatten().copied();
        let bottom = all().filter(|value| value.is_finite()).fold(0.0, f64::min) * 1.1;
        let groups = self.groups.len() as f64;
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(30)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..groups.max(1.0) * BESIDE, bottom..top(all()))?;
        chart.configure_mesh().disable_x_mesh().disable_x_axis().y_desc(self.unit).draw()?;
        let width = 0.8 / self.series.len().max(1) as f64;
        for (index, (name, values)) in self.series.iter().enumerate() {
            let filled = colour(index).filled();
            let bars = values.iter().enumerate().filter_map(|(group, value)| {
                let left = group as f64 + 0.1 + index as f64 * width;
                value.map(|value| Rectangle::new([(left, 0.0), (left + width, value)], filled))
            });
            chart
                .draw_series(bars)?
                .label(name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], filled));
        }
        let style = ("sans-serif", 13).into_font().color(&BLACK);
        let labels = self.groups.iter().enumerate();
        chart.draw_series(labels.map(|(group, label)| {
            Text::new(label.clone(), (group as f64 + 0.1, bottom), style.clone())
        }))?;
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
        Ok(())
    }
}

impl Lines {
    fn draw(&self, area: &Area<'_>) -> Drawn {
        let all = || self.series.iter().flat_map(|(_, points)| points);
        let (least, most) = all()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), point| {
                (least.min(point.0), most.max(point.0))
            });
        if least > most {
            return Ok(());
        }
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(
                least..most.max(least + 1.0),
                0.0..top(all().map(|point| point.1)),
            )?;
        chart.configure_mesh().x_desc(self.across).y_desc(self.unit).draw()?;
        for (index, (name, points)) in self.series.iter().enumerate() {
            let line = colour(index).stroke_width(2);
            chart
                .draw_series(LineSeries::new(points.iter().copied(), line))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], line));
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
        Ok(())
    }
}

impl Map {
    fn draw(&self, area: &Area<'_>) -> Drawn {
        let (columns, rows) = (self.columns.len(), self.rows.len());
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(
                -0.5..columns.max(1) as f64 - 0.5,
                -0.5..rows.max(1) as f64 - 0.5,
            )?;
        // A label stands in the middle of its fields.
        let name = |labels: &[String], at: f64| {
            let index = at.round();
            let near = (at - index).abs() < 1e-6 && index >= -0.1;
            labels.get(index as usize).filter(|_| near).cloned().unwrap_or_default()
        };
        chart
            .configure_mesh()
            .disable_mesh()
            .x_labels(columns)
            .y_labels(rows)
            .x_label_formatter(&|at| name(&self.columns, *at))
            .y_label_formatter(&|at| name(&self.rows, *at))
            .x_desc(self.across)
            .y_desc(self.along)
            .draw()?;
        chart.draw_series(self.fields.iter().map(|&(column, row, value)| {
            let (x, y) = (column as f64, row as f64);
            Rectangle::new([(x - 0.5, y - 0.5), (x + 0.5, y + 0.5)], shade(value).filled())
        }))?;
        let style = ("sans-serif", 13).into_font().color(&BLACK);
        chart.draw_series(self.fields.iter().map(|&(column, row, value)| {
            let place = (column as f64 - 0.15, row as f64 + 0.1);
            Text::new(format!("{value:.2}"), place, style.clone())
        }))?;
        Ok(())
    }
}

/// From red over yellow to green.
fn shade(value: f64) -> RGBColor {
    let value = if value.is_finite() { value.clamp(0.0, 1.0) } else { 0.0 };
    let part = |from: f64, to: f64, share: f64| (from + (to - from) * share) as u8;
    if value < 0.5 {
        let share = value * 2.0;
        RGBColor(part(240.0, 250.0, share), part(130.0, 225.0, share), part(120.0, 130.0, share))
    } else {
        let share = value * 2.0 - 1.0;
        RGBColor(part(250.0, 110.0, share), part(225.0, 200.0, share), part(130.0, 130.0, share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_chart_is_drawn_with_its_names_and_numbers() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("chart.svg");
        let panels = [
            Panel::Bars(Bars {
                title: "a < b".into(),
                unit: "GB/s",
                groups: vec!["R6".into(), "W13".into()],
                series: vec![
                    ("direct".into(), vec![Some(1.0), None]),
                    ("staged".into(), vec![Some(50.0), Some(f64::NAN)]),
                ],
            }),
            Panel::Lines(Lines {
                title: "sweep".into(),
                across: "bytes",
                unit: "GB/s",
                series: vec![("kernel".into(), vec![(512.0, 1.0), (1600.0, 2.0)])],
            }),
            Panel::Lines(Lines { title: "nothing".into(), ..Lines::default() }),
            Panel::Map(Map {
                title: "grid".into(),
                across: "bytes",
                along: "pieces",
                columns: vec!["1 KiB".into(), "2 KiB".into()],
                rows: vec!["16".into()],
                fields: vec![(0, 0, 0.25), (1, 0, 7.0)],
            }),
        ];
        draw(&path, &panels).expect("drawn");
        let text = std::fs::read_to_string(&path).expect("written");
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        for word in ["a &lt; b", "W13", "staged", "sweep", "kernel", "2 KiB", "16", "0.25", "7.00"]
        {
            assert!(text.contains(word), "{word} is missing");
        }
        draw(&path, &[]).expect("an empty picture is one");
        assert!(draw(&folder.path().join("no/such/folder"), &[]).is_err());
    }
}
