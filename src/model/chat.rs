//! A model's chat template, rendered as Hugging Face does it.
//!
//! A template is a program that came with a download. It is run with a budget of work, and its size and the size
//! of what it writes are bounded; it sees the conversation and the two special tokens, nothing else.

pub mod templates;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::Regex;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::checkpoint::{Checkpoint, CheckpointError, KeyError};
use templates::{DEFAULT, templates};

/// The largest template that is read; the longest in use are a tenth of it.
const TEMPLATE_BYTES: usize = 256 << 10;
/// What a template may write, beyond sixteen times what it was given.
const OUTPUT_BYTES: usize = 1 << 20;
/// Instructions a template may run, beyond those its input pays for; also bounds its memory (64 bytes each).
const FUEL: u64 = 2_000_000;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    pub content: String,
}

impl Object for Message {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "role" => Some(self.role.as_str().into()),
            "content" => Some(self.content.as_str().into()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["role", "content"])
    }
}

/// What can be wrong with a chat template.
#[derive(Debug, Error)]
pub enum ChatError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("the chat template in `{origin}` is not readable: {why}")]
    Form { origin: String, why: String },
    #[error(
        "`{dir}` has two chat templates of the name `{name}`: that in `{}` is not that in `{}`; transformers uses the \
         first, llama.cpp's converter the second: remove one of them",
        files[0],
        files[1]
    )]
    TwoTemplates { dir: PathBuf, name: String, files: Box<[String; 2]> },
    #[error("`chat_template` of `{file}` has two templates of the name `{name}`; keep one")]
    Repeated { file: String, name: String },
    #[error("the chat template in `{origin}` has {bytes} bytes; at most {TEMPLATE_BYTES} are read")]
    TooLong { origin: String, bytes: usize },
    #[error("the chat template in `{origin}` fails at line {line}: {why}")]
    Template { origin: String, line: usize, why: String },
    #[error("the chat template in `{origin}` refuses this conversation: {why}")]
    Refused { origin: String, why: String },
    #[error("the chat template in `{origin}` does not come to an end (stopped at line {line})")]
    Endless { origin: String, line: usize },
    #[error("the chat template in `{origin}` writes more than {limit} bytes")]
    TooMuch { origin: String, limit: usize },
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    origin: String,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// The model's default template (see [`templates`]); nothing if there is none at all.
    pub fn load(checkpoint: &Checkpoint) -> Result<Option<Self>, ChatError> {
        let all = templates(checkpoint)?;
        let Some(found) = all.iter().find(|template| template.name == DEFAULT) else {
            let Some(first) = all.first() else { return Ok(None) };
            let names = all.iter().map(|template| &*template.name).collect::<Vec<_>>().join(", ");
            let why = format!("none of its templates ({names}) is named `{DEFAULT}`");
            return Err(ChatError::Form { origin: first.file.clone(), why });
        };
        let (config, map) = (checkpoint.side("tokenizer_config.json")?, checkpoint.side("special_tokens_map.json")?);
        let token = |role| -> Result<Option<String>, CheckpointError> {
            let own = config.keys().token(role)?.map(str::to_owned);
            Ok(own.or(map.keys().token(role)?.map(str::to_owned)))
        };
        let origin = checkpoint.dir().join(&found.file).display().to_string();
        Self::new(&found.source, &origin, token("bos_token")?, token("eos_token")?).map(Some)
    }

    /// Compiles `source`; `origin` is what messages call it.
    pub fn new(source: &str, origin: &str, bos: Option<String>, eos: Option<String>) -> Result<Self, ChatError> {
        let origin = origin.to_owned();
        if source.len() > TEMPLATE_BYTES {
            return Err(ChatError::TooLong { origin, bytes: source.len() });
        }
        let compiled = environment()
            .and_then(|mut env| env.add_template_owned("chat", without_generation_marks(source)).map(|()| env));
        match compiled {
            Ok(env) => Ok(Self { env, origin, bos, eos }),
            Err(e) => Err(ChatError::Template { origin, line: e.line().unwrap_or(1), why: reason(&e) }),
        }
    }

    /// The conversation as the model was trained to read it. With `add_generation_prompt` it ends where the
    /// assistant's next turn begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let given: usize = messages.iter().map(|m| m.role.len() + m.content.len()).sum();
        let limit = OUTPUT_BYTES + 16 * given;
        let mut env = self.env.clone();
        env.set_fuel(Some(FUEL + given as u64));
        let context = context! {
            messages => messages.iter().cloned().map(Value::from_object).collect::<Vec<_>>(),
            add_generation_prompt,
            tools => (),
            documents => (),
            ..self.special_tokens()
        };
        let mut out = Bounded { bytes: Vec::new(), limit, full: false };
        let outcome = env.get_template("chat").and_then(|chat| chat.render_captured_to(context, &mut out).map(|_| ()));
        let full = out.full;
        let text = outcome.and_then(|()| {
            String::from_utf8(out.bytes).map_err(|_| Error::new(ErrorKind::InvalidOperation, "it writes broken UTF-8"))
        });
        text.map_err(|e| self.failure(&e, full.then_some(limit)))
    }

    fn special_tokens(&self) -> Value {
        let both = [("bos_token", &self.bos), ("eos_token", &self.eos)];
        let named = both.into_iter().filter_map(|(key, token)| Some((key, token.clone()?)));
        Value::from(named.collect::<BTreeMap<_, _>>())
    }

    fn failure(&self, error: &Error, overflowed: Option<usize>) -> ChatError {
        let origin = self.origin.clone();
        let line = error.line().unwrap_or(1);
        if let Some(limit) = overflowed {
            return ChatError::TooMuch { origin, limit };
        }
        if error.kind() == ErrorKind::OutOfFuel {
            return ChatError::Endless { origin, line };
        }
        let mut cause = error.source();
        while let Some(inner) = cause {
            if let Some(refusal) = inner.downcast_ref::<Refusal>() {
                return ChatError::Refused { origin, why: refusal.0.clone() };
            }
            cause = inner.source();
        }
        ChatError::Template { origin, line, why: reason(error) }
    }
}

/// What a template passes to `raise_exception`.
#[derive(Debug, Error)]
#[error("{0}")]
struct Refusal(String);

fn reason(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// Marks that Hugging Face uses to find the assistant's tokens for training become blocks without effect.
fn without_generation_marks(source: &str) -> String {
    let Ok(mark) = Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})") else { return source.into() };
    let as_if = |found: &regex::Captures<'_>| {
        let word = if found.get(2).is_some() { "endif" } else { "if true" };
        format!("{}{word}{}", &found[1], &found[3])
    };
    mark.replace_all(source, as_if).into_owned()
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    let mut syntax = minijinja::syntax::SyntaxConfig::builder();
    env.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(unknown_method_callback);
    env.set_recursion_limit(100);
    env.add_function("raise_exception", |why: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, why.clone()).with_source(Refusal(why)))
    });
    env.add_filter("tojson", |state: &State, value: &Value, options: Kwargs| -> Result<Value, Error> {
        let indent = options.get::<Option<usize>>("indent")?.map(|n| n.min(16));
        let mut json = Json { state, indent, out: String::new() };
        json.value(value, 0)?;
        Ok(Value::from(json.out))
    });
    env.add_function("strftime_now", |format: String| fixed_date(&format));
    Ok(env)
}

/// Some templates write today's date. Calibration must not change from day to day, so it is always Friday,
/// 26 July 2024, the date that Llama 3's template falls back to.
fn fixed_date(format: &str) -> String {
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str("2024"),
            Some('y') => out.push_str("24"),
            Some('m') => out.push_str("07"),
            Some('B') => out.push_str("July"),
            Some('b' | 'h') => out.push_str("Jul"),
            Some('d' | 'e') => out.push_str("26"),
            Some('A') => out.push_str("Friday"),
            Some('a') => out.push_str("Fri"),
            Some('j') => out.push_str("208"),
            Some('F') => out.push_str("2024-07-26"),
            Some('T' | 'X') => out.push_str("12:00:00"),
            Some('H' | 'I') => out.push_str("12"),
            Some('M' | 'S') => out.push_str("00"),
            Some('p') => out.push_str("PM"),
            Some('%') | None => out.push('%'),
            Some(other) => out.extend(['%', other]),
        }
    }
    out
}

/// Nesting that [`Json`] follows at most.
const JSON_DEPTH: usize = 64;

/// Python's `json.dumps(value, ensure_ascii=False)`, which is what Hugging Face's `tojson` is: no HTML escapes,
/// and a space after commas and colons. Each value and each byte is paid for.
struct Json<'a, 'b, 'c> {
    state: &'a State<'b, 'c>,
    indent: Option<usize>,
    out: String,
}

impl Json<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.state.consume_fuel(1)?;
        if depth > JSON_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "too deeply nested for JSON"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool | ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Map => self.list(value, ['{', '}'], depth)?,
            ValueKind::Seq | ValueKind::Iterable => self.list(value, ['[', ']'], depth)?,
            other => return Err(Error::new(ErrorKind::BadSerialization, format!("{other} has no form in JSON"))),
        }
        Ok(())
    }

    fn list(&mut self, values: &Value, [open, close]: [char; 2], depth: usize) -> Result<(), Error> {
        self.out.push(open);
        let mut any = false;
        for item in values.try_iter()? {
            match (any, self.indent) {
                (true, None) => self.out.push_str(", "),
                (true, Some(_)) => self.out.push(','),
                (false, _) => {}
            }
            any = true;
            self.line(depth + 1);
            if open == '{' {
                self.string(&item.to_string())?;
                self.out.push_str(": ");
                self.value(&values.get_item(&item)?, depth + 1)?;
            } else {
                self.value(&item, depth + 1)?;
            }
        }
        if any {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        self.state.consume_fuel(text.len() as u64 / 64)?;
        self.out.push_str(&serde_json::Value::from(text).to_string());
        Ok(())
    }
}

/// Bytes up to a limit; the write that would pass it fails.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
    full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            self.full = true;
            return Err(io::Error::other("too much output"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, ChatError> {
        let messages = [Message { role: "user".into(), content: "a <b> \"c\" é".into() }];
        ChatTemplate::new(source, "test", Some("<s>".into()), None)?.render(&messages, true)
    }

    #[test]
    fn json_is_python_s() {
        let got = render("{{ {'k': [1, messages[0].content]} | tojson }}").unwrap_or_else(|e| e.to_string());
        assert_eq!(got, r#"{"k": [1, "a <b> \"c\" é"]}"#);
        let got = render("{{ [1] | tojson(indent=2) }}").unwrap_or_else(|e| e.to_string());
        assert_eq!(got, "[\n  1\n]");
    }

    #[test]
    fn absent_tokens_are_empty_and_python_methods_work() {
        let source = "{{ bos_token }}|{{ eos_token }}|{{ messages[0]['content'].split(' ')[0].upper() }}|\
                      {{ tools is none }}|{{ strftime_now('%d %b %Y') }}";
        assert_eq!(render(source).unwrap_or_else(|e| e.to_string()), "<s>||A|True|26 Jul 2024");
    }

    #[test]
    fn generation_marks_have_no_effect() {
        let source = "x{%- generation -%} y {% endgeneration %}z";
        assert_eq!(render(source).unwrap_or_else(|e| e.to_string()), "xy z");
    }

    #[test]
    fn errors_name_line_and_reason() {
        let message = |source: &str| render(source).map_or_else(|e| e.to_string(), |text| format!("rendered {text}"));
        let text = message("one\n{% if %}");
        assert!(text.contains("`test` fails at line 2: syntax error"), "{text}");
        let text = message("{{ raise_exception('roles must alternate') }}");
        assert_eq!(text, "the chat template in `test` refuses this conversation: roles must alternate");
        let text = message("\n\n{{ messages[0].nothing.more }}");
        assert!(text.contains("at line 3: undefined value"), "{text}");
    }
}
