//! Tables, written in the ways of the forms.

/// How a column is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    Text,
    Number,
    /// Hashes, names of files.
    Code,
    /// `pass`, `warn`, `fail`, ...
    Status,
}

/// A table with a head.
#[derive(Clone, Debug)]
pub struct Table {
    pub caption: String,
    pub columns: Vec<(&'static str, Column)>,
    pub rows: Vec<Vec<String>>,
    /// Only for forms in which it can be folded away.
    pub long: bool,
}

impl Table {
    pub fn new(caption: impl Into<String>, columns: &[(&'static str, Column)]) -> Self {
        Self { caption: caption.into(), columns: columns.to_vec(), rows: Vec::new(), long: false }
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(cells.into_iter().map(|cell| clean(&cell.into())).collect());
    }

    /// Without the columns that are empty in all rows.
    pub fn trimmed(mut self) -> Self {
        let filled = |i: usize| self.rows.iter().any(|row| row.get(i).is_some_and(|cell| !cell.is_empty()));
        let keep: Vec<bool> = (0..self.columns.len()).map(filled).collect();
        let mut places = keep.iter();
        self.columns.retain(|_| places.next().copied().unwrap_or(false));
        for row in &mut self.rows {
            let mut places = keep.iter();
            row.retain(|_| places.next().copied().unwrap_or(false));
        }
        self
    }

    /// For a terminal: columns in line, two spaces between them.
    pub fn text(&self, indent: &str) -> String {
        let head: Vec<String> = self.columns.iter().map(|(title, _)| title.to_string()).collect();
        let width = |i: usize| {
            let cells = self.rows.iter().map(|row| row.get(i).map_or(0, |cell| cell.chars().count()));
            cells.max().unwrap_or(0).max(head[i].chars().count())
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let mut out = String::new();
        for row in std::iter::once(&head).chain(&self.rows) {
            let mut line = indent.to_string();
            for ((cell, width), (_, column)) in row.iter().zip(&widths).zip(&self.columns) {
                let padding = " ".repeat(width - cell.chars().count());
                match column {
                    Column::Number => line.push_str(&format!("{padding}{cell}  ")),
                    _ => line.push_str(&format!("{cell}{padding}  ")),
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }

    /// For Markdown as GitHub reads it.
    pub fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut out = line(self.columns.iter().map(|(title, _)| escape(title)).collect());
        let rule = |(_, column): &(&str, Column)| if *column == Column::Number { "---:" } else { "---" }.to_string();
        out.push_str(&line(self.columns.iter().map(rule).collect()));
        for row in &self.rows {
            let cells = row.iter().zip(&self.columns).map(|(cell, (_, column))| match column {
                Column::Status if cell == "fail" || cell == "unknown" => format!("**{}**", escape(cell)),
                _ => escape(cell),
            });
            out.push_str(&line(cells.collect()));
        }
        out
    }
}

/// On one line, without what XML 1.0 cannot hold and a terminal would obey. Names and messages may come from files that
/// nobody trusts.
pub fn clean(text: &str) -> String {
    let allowed = |c: char| !(c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'));
    text.chars().map(|c| if allowed(c) { c } else { ' ' }).collect()
}

/// Text that Markdown shows as it is, on one line. Messages may hold names from files that nobody trusts.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '~' | '#' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new("c", &[("name", Column::Text), ("none", Column::Text), ("n", Column::Number)]);
        table.row(["a|b", "", "1.5"]);
        table.row(["±é", "", "10"]);
        table.trimmed()
    }

    #[test]
    fn texts_stand_in_line() {
        assert_eq!(table().text(" "), " name    n\n a|b   1.5\n ±é     10\n");
    }

    #[test]
    fn cells_have_no_control_characters() {
        let mut table = Table::new("c", &[("name", Column::Text)]);
        table.row(["a\u{1b}[2J\nb\u{9b}"]);
        assert_eq!(table.rows[0][0], "a [2J b ");
    }

    #[test]
    fn markdown_cannot_be_broken_out_of() {
        assert_eq!(table().markdown(), "| name | n |\n| --- | ---: |\n| a\\|b | 1.5 |\n| ±é | 10 |\n");
        assert_eq!(escape("<img>\n[x](y) *b*"), "&lt;img&gt; \\[x\\](y) \\*b\\*");
    }
}
