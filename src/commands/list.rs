//! `quantkit list`

use anyhow::Result;
use serde_json::json;

use crate::cli::args::ListArgs;
use crate::cli::print::Printer;
use crate::format::{self, consumers::CONSUMERS};
use crate::model::families::FAMILIES;
use crate::report::schema;

pub fn run(args: &ListArgs, printer: Printer) -> Result<()> {
    if args.report_schema {
        return Ok(printer.object(&schema::report())?);
    }
    printer.object(&json!({
        "families": FAMILIES.iter().map(|f| json!({"model_type": f.model_type, "label": f.label, "architectures": f.architectures})).collect::<Vec<_>>(),
        "consumers": CONSUMERS.iter().map(|c| json!({"name": c.name, "title": c.title})).collect::<Vec<_>>(),
        "formats": format::readable().collect::<Vec<_>>(),
    }))?;
    printer.text("Model families (model_type, what it is):")?;
    for family in FAMILIES {
        printer.text(format!("  {:<14} {}", family.model_type, family.label))?;
    }
    printer.text("Consumers (for --for):")?;
    for consumer in CONSUMERS {
        printer.text(format!("  {:<14} {}", consumer.name, consumer.title))?;
    }
    printer
        .text(format!("Artifact formats read and written: {}", format::readable().collect::<Vec<_>>().join(", ")))?;
    Ok(())
}
