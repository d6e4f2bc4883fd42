//! Patterns of tensor names, `REGEX=TYPE`: read, and where one gives no tensor its type, the reason. The same for the
//! options of the embedding and the output head.

use regex::Regex;

use super::{Options, SelectError, is_quantized};
use crate::format::gguf::names::hugging_face_part;
use crate::num::ggml::GgmlType;

/// `REGEX=TYPE`, as `--tensor-type` takes it.
pub fn parse_tensor_type(text: &str) -> Result<(Regex, GgmlType), SelectError> {
    let (pattern, kind) = text.rsplit_once('=').ok_or_else(|| SelectError::TensorType(text.into()))?;
    let kind = GgmlType::parse(kind).ok_or_else(|| SelectError::UnknownType {
        name: kind.into(),
        known: GgmlType::ALL.map(GgmlType::name).join(", "),
    })?;
    let regex = Regex::new(pattern)
        .map_err(|e| SelectError::Pattern { pattern: pattern.into(), why: e.to_string().replace('\n', " ") })?;
    Ok((regex, kind))
}

/// Why `pattern` gives none of `tensors` (name, shape) its type, and what would.
pub(super) fn why_without_effect(pattern: &Regex, tensors: &[&(String, Vec<usize>)], options: &Options) -> String {
    let matched: Vec<_> = tensors.iter().filter(|(name, _)| pattern.is_match(name)).collect();
    if let Some((name, _)) = matched.iter().find(|(name, shape)| is_quantized(name, shape)) {
        return match name == "output.weight" && options.keep_output {
            true => "`output.weight` is left as it is".into(),
            false => format!("an earlier pattern or another option decides that of all it matches, such as `{name}`"),
        };
    }
    if let Some((name, _)) = matched.first() {
        return format!("it matches only tensors that are never quantized, such as `{name}`");
    }
    if pattern.is_match("output.weight") {
        return "this model has no `output.weight`: `token_embd.weight` is the output head as well".into();
    }
    let stems = || tensors.iter().filter(|(name, shape)| is_quantized(name, shape)).map(|(name, _)| stem(name));
    let example = tensors.iter().map(|(name, _)| &**name).rfind(|name| name.ends_with(".weight")).unwrap_or_default();
    let hint = match hugging_face_part(pattern.as_str()) {
        Some((part, there)) => format!("; `{part}` is `{there}` there"),
        None => {
            let near = |word: &str| stems().find(|stem| strsim::damerau_levenshtein(word, stem) <= word.len() / 4);
            let words = pattern.as_str().split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let nearest = words.filter(|word| word.len() > 3).find_map(near);
            nearest.map_or(String::new(), |stem| format!("; `{stem}` is one of their parts"))
        }
    };
    format!("no tensor matches it; names are GGUF's, such as `{example}`{hint}")
}

/// What the user asks for of the embedding or the output head and does not get, where the model has no output head of
/// its own: in words.
pub fn not_applied(tensors: &[(String, Vec<usize>)], options: &Options) -> Vec<String> {
    if tensors.iter().any(|(name, _)| name == "output.weight") {
        return Vec::new();
    }
    let mut all = Vec::new();
    if options.keep_output {
        all.push("--leave-output-tensor has no effect".to_string());
    }
    let by_pattern = options.tensors.iter().find(|(pattern, _)| pattern.is_match("token_embd.weight"));
    let decided = options.token_embedding.or(by_pattern.map(|(_, kind)| *kind));
    match (options.output, decided) {
        (Some(_), Some(kind)) => all.push(format!("--output-tensor-type has no effect; its type is {kind}")),
        (Some(_), None) if options.pure => all.push("--output-tensor-type has no effect with --pure".into()),
        (Some(kind), None) => all.push(format!("--output-tensor-type makes it {kind}")),
        (None, _) => {}
    }
    all.iter().map(|what| format!("`token_embd.weight` is the output head as well: {what}")).collect()
}

/// The part of a name that says what a tensor is: `ffn_down` of `blk.0.ffn_down.weight`.
fn stem(name: &str) -> &str {
    name.rsplit('.').nth(1).unwrap_or(name)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::format::gguf::file_type::FileType;

    #[test]
    fn reasons() {
        let shapes: [(String, Vec<usize>); 4] = [
            ("token_embd.weight".into(), vec![8, 256]),
            ("blk.0.attn_norm.weight".into(), vec![256]),
            ("blk.0.attn_q.weight".into(), vec![256, 256]),
            ("blk.0.ffn_down.weight".into(), vec![256, 256]),
        ];
        let tensors: Vec<_> = shapes.iter().collect();
        let options = Options::new(FileType::Q4_0);
        for (pattern, words) in [
            ("ffn_dwn", ["no tensor matches it", "`ffn_down` is one of their parts"]),
            ("layers.0.mlp.down_proj", ["such as `blk.0.ffn_down.weight`", "`down_proj` is `ffn_down` there"]),
            ("embed_tokens", ["no tensor matches it", "`embed_tokens` is `token_embd` there"]),
            ("blk.7.", ["no tensor matches it", "names are GGUF's"]),
            ("norm", ["never quantized", "`blk.0.attn_norm.weight`"]),
            ("^output", ["no `output.weight`", "`token_embd.weight` is the output head"]),
            ("down", ["an earlier pattern", "`blk.0.ffn_down.weight`"]),
        ] {
            let why = why_without_effect(&Regex::new(pattern).unwrap(), &tensors, &options);
            assert!(words.iter().all(|word| why.contains(word)), "{pattern}: {why}");
        }
    }
}
