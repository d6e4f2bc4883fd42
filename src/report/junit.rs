//! A verdict as JUnit XML, as CI servers read it: one test case a row.

use std::collections::BTreeMap;

use quick_xml::Writer;
use quick_xml::events::{BytesDecl, BytesText, Event};

use super::gate::{Outcome, Row, Verdict};
use super::table::clean;
use super::{Report, ReportError};

/// The XML. Rows that fail are failures, those without a verdict are skipped, warnings pass and speak in `system-out`.
pub fn write(report: &Report, verdict: &Verdict) -> Result<String, ReportError> {
    let written = document(report, verdict).map_err(|e| e.to_string());
    let text = written.and_then(|bytes| String::from_utf8(bytes).map_err(|e| e.to_string()));
    text.map_err(|why| ReportError::Form { form: "JUnit XML", why })
}

fn document(report: &Report, verdict: &Verdict) -> std::io::Result<Vec<u8>> {
    let count = |of: &dyn Fn(&&Row) -> bool| verdict.rows.iter().filter(of).count().to_string();
    let (tests, failures) = (verdict.rows.len().to_string(), count(&|row| verdict.fails(row)));
    let skipped = count(&|row| skips(verdict, row));
    let suite = clean(&report.artifact.name);
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
    writer.write_event(Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None)))?;
    let counts = [("tests", tests.as_str()), ("failures", &failures), ("skipped", &skipped)];
    let suites = writer.create_element("testsuites").with_attribute(("name", "quantkit")).with_attributes(counts);
    suites.write_inner_content(|writer| {
        let element =
            writer.create_element("testsuite").with_attribute(("name", suite.as_str())).with_attributes(counts);
        element.write_inner_content(|writer| {
            let mut rows = verdict.rows.iter().zip(names(verdict));
            rows.try_for_each(|(row, name)| case(writer, (&suite, &name), verdict, row))
        })?;
        Ok(())
    })?;
    let mut out = writer.into_inner();
    out.push(b'\n');
    Ok(out)
}

fn skips(verdict: &Verdict, row: &Row) -> bool {
    !verdict.fails(row) && matches!(row.outcome, Outcome::Info | Outcome::Unknown)
}

/// What the rows are called; those of one name are numbered, since CI servers show one test case a name.
fn names(verdict: &Verdict) -> Vec<String> {
    let mut seen = BTreeMap::new();
    let name = |row: &Row| {
        let name = clean(&row.what);
        let times = seen.entry(name.clone()).and_modify(|n| *n += 1).or_insert(1);
        if *times > 1 { format!("{name} ({times})") } else { name }
    };
    verdict.rows.iter().map(name).collect()
}

fn case(
    writer: &mut Writer<Vec<u8>>,
    (suite, name): (&str, &str),
    verdict: &Verdict,
    row: &Row,
) -> std::io::Result<()> {
    let element = writer.create_element("testcase");
    let element = element.with_attribute(("classname", suite)).with_attribute(("name", name));
    let message = clean(&message(row));
    if verdict.fails(row) {
        let inner = |writer: &mut Writer<Vec<u8>>| {
            let failure = writer.create_element("failure").with_attribute(("message", message.as_str()));
            failure.write_text_content(BytesText::new(&message)).map(|_| ())
        };
        element.write_inner_content(inner)?;
    } else if skips(verdict, row) {
        let inner = |writer: &mut Writer<Vec<u8>>| {
            let skipped = writer.create_element("skipped").with_attribute(("message", message.as_str()));
            skipped.write_empty().map(|_| ())
        };
        element.write_inner_content(inner)?;
    } else if message.is_empty() {
        element.write_empty()?;
    } else {
        let inner = |writer: &mut Writer<Vec<u8>>| {
            writer.create_element("system-out").write_text_content(BytesText::new(&message)).map(|_| ())
        };
        element.write_inner_content(inner)?;
    }
    Ok(())
}

fn message(row: &Row) -> String {
    let show = |name: &str, value: Option<f64>| value.map(|value| format!("{name} {}", row.unit.show(value)));
    let moved = Some(row.moved_text()).filter(|text| !text.is_empty()).map(|text| format!("moved {text}"));
    let limit = row.limit.as_ref().map(|limit| format!("limit: {limit}"));
    let note = Some(row.note.clone()).filter(|note| !note.is_empty());
    let parts = [show("now", row.now), show("baseline", row.baseline), moved, limit, note];
    let warned = (row.outcome == Outcome::Warn).then(|| "warning".to_string());
    warned.into_iter().chain(parts.into_iter().flatten()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::integrity::{Check, Status};
    use crate::report::gate::judge;
    use crate::report::thresholds::Thresholds;

    #[test]
    fn cases_have_distinct_names() {
        let mut report = Report::new(Default::default(), "cpu");
        for message in ["q", "k", "v"] {
            report.checks.push(Check { id: "modules".into(), status: Status::Fail, message: message.into() });
        }
        let text = write(&report, &judge(&report, None, &Thresholds::default())).unwrap();
        for name in ["check modules", "check modules (2)", "check modules (3)"] {
            assert_eq!(text.matches(&format!("name=\"{name}\"")).count(), 1, "{text}");
        }
    }
}
