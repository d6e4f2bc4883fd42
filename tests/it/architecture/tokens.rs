//! Rust sources as tokens, and the paths that they name.

pub type Token<'a> = (usize, &'a str);

/// Words, `::` and single signs with their lines; no comments, strings or characters.
pub fn tokens(source: &str) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b >= 0x80;
    let find = |from: usize, what: &str| source[from..].find(what).map_or(source.len(), |at| from + at);
    let mut out = Vec::new();
    let (mut at, mut counted, mut line) = (0, 0, 1);
    while at < bytes.len() {
        line += source[counted..at].matches('\n').count();
        counted = at;
        let rest = &source[at..];
        at = if rest.starts_with("//") {
            find(at, "\n")
        } else if rest.starts_with("/*") {
            end_of_block_comment(bytes, at)
        } else if bytes[at] == b'"' {
            end_of_quotes(bytes, at + 1, b'"')
        } else if bytes[at] == b'\'' {
            let one = rest[1..].chars().next().map_or(0, char::len_utf8);
            match rest[1..].starts_with('\\') || rest[1 + one..].starts_with('\'') {
                true => end_of_quotes(bytes, at + 1, b'\''),
                false => at + 1, // A lifetime.
            }
        } else if word(bytes[at]) {
            let end = (at..bytes.len()).find(|&i| !word(bytes[i])).unwrap_or(bytes.len());
            let hashes = source[end..].len() - source[end..].trim_start_matches('#').len();
            if ["r", "br", "cr"].contains(&&source[at..end]) && source[end + hashes..].starts_with('"') {
                let close = format!("\"{}", &source[end..end + hashes]);
                find(end + hashes + 1, &close) + close.len()
            } else {
                out.push((line, &source[at..end]));
                end
            }
        } else if rest.starts_with("::") {
            out.push((line, "::"));
            at + 2
        } else {
            if !bytes[at].is_ascii_whitespace() {
                out.push((line, &rest[..1]));
            }
            at + 1
        };
    }
    out
}

fn end_of_quotes(bytes: &[u8], mut at: usize, quote: u8) -> usize {
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

fn end_of_block_comment(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 0;
    while at < bytes.len() {
        match bytes.get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") if depth == 1 => return at + 2,
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

pub fn starts(tokens: &[Token], words: &[&str]) -> bool {
    tokens.len() >= words.len() && tokens.iter().zip(words).all(|((_, token), word)| token == word)
}

/// Without the items under `#[cfg(test)]`.
pub fn without_tests<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let rest = &tokens[at..];
        if starts(rest, &["#", "[", "cfg", "(", "test", ")"])
            || starts(rest, &["#", "[", "cfg", "(", "all", "(", "test"])
        {
            at += end_of_item(rest);
        } else {
            out.push(tokens[at]);
            at += 1;
        }
    }
    out
}

/// How many tokens the item at the start takes: up to its `;` or closing brace, or the end of what holds it.
fn end_of_item(tokens: &[Token]) -> usize {
    let mut depth = 0;
    for (i, (_, token)) in tokens.iter().enumerate() {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" if depth == 0 => return i,
            "}" if depth == 1 => return i + 1,
            ")" | "]" | "}" => depth -= 1,
            ";" if depth == 0 => return i + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// Names from the crate's root, such as `["num", "bits", "read"]`; the crate itself has none.
pub type Names<'a> = Vec<&'a str>;

/// What a file reaches for in its own crate, with lines: every path that starts with `crate`, `self` or `super`, each
/// path of a group by itself. `module` is the file's own path.
pub fn paths<'a>(module: &[&'a str], tokens: &[Token<'a>]) -> Vec<(usize, Names<'a>)> {
    let mut out = Vec::new();
    let (mut braces, mut inner) = (0, Vec::new());
    for (i, &(line, token)) in tokens.iter().enumerate() {
        let rest = &tokens[i..];
        let goes_on = starts(&rest[1..], &["::"]) && (i == 0 || tokens[i - 1].1 != "::");
        match token {
            "{" => {
                braces += 1;
                if i >= 2 && tokens[i - 2].1 == "mod" {
                    inner.push((braces, tokens[i - 1].1));
                }
            }
            "}" => {
                inner.pop_if(|(depth, _)| *depth == braces);
                braces -= 1;
            }
            "crate" | "quantkit" if goes_on => drop(expand(&rest[2..], &[], &mut out)),
            "crate" if starts(&rest[1..], &["as"]) => out.push((line, Vec::new())),
            "super" | "self" if goes_on => {
                let mut base = [module, &inner.iter().map(|(_, name)| *name).collect::<Vec<_>>()].concat();
                let steps = rest.chunks(2).take_while(|pair| matches!(pair, [(_, "super" | "self"), (_, "::")]));
                let steps: Vec<&str> = steps.map(|pair| pair[0].1).collect();
                base.truncate(base.len().saturating_sub(steps.iter().filter(|step| **step == "super").count()));
                expand(&rest[2 * steps.len()..], &base, &mut out);
            }
            _ => {}
        }
    }
    out
}

/// Names that modules pass on: the full name below `module` and what it stands for, for each `pub use` of one name.
pub fn passed_on<'a>(module: &[&'a str], tokens: &[Token<'a>]) -> Vec<(Names<'a>, Names<'a>)> {
    let mut out = Vec::new();
    for (i, (_, token)) in tokens.iter().enumerate() {
        if *token != "use" || i == 0 || !["pub", ")"].contains(&tokens[i - 1].1) {
            continue;
        }
        let item = &tokens[i + 1..i + end_of_item(&tokens[i..])];
        let absolute = item.first().is_some_and(|(_, head)| ["crate", "self", "super"].contains(head));
        let found = if absolute {
            paths(module, item)
        } else {
            let mut found = Vec::new();
            expand(item, module, &mut found);
            found
        };
        for (_, path) in found {
            let name = path.last().copied().unwrap_or("*");
            out.push(([module, &[name]].concat(), path));
        }
    }
    out
}

/// The paths of a tree that starts here, below `prefix`; how many tokens it takes.
fn expand<'a>(tokens: &[Token<'a>], prefix: &[&'a str], out: &mut Vec<(usize, Names<'a>)>) -> usize {
    match tokens {
        [(_, "{"), ..] => {
            let mut at = 1;
            while at < tokens.len() && tokens[at].1 != "}" {
                at += if tokens[at].1 == "," { 1 } else { expand(&tokens[at..], prefix, out) };
            }
            at + 1
        }
        [(line, "self"), ..] => {
            out.push((*line, prefix.to_vec()));
            1 + renamed(&tokens[1..])
        }
        [(line, name), rest @ ..] => {
            let path = [prefix, &[*name]].concat();
            let more =
                |next: &str| next == "{" || next == "*" || next.starts_with(|c: char| c.is_alphabetic() || c == '_');
            match rest {
                [(_, "::"), (_, next), ..] if more(next) => 2 + expand(&rest[1..], &path, out),
                _ => {
                    out.push((*line, path));
                    1 + renamed(rest)
                }
            }
        }
        [] => 1,
    }
}

/// How many tokens `as NAME` takes, if it is there.
fn renamed(tokens: &[Token]) -> usize {
    if starts(tokens, &["as"]) { 2 } else { 0 }
}
