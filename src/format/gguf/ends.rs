//! The tokens that end a text. A model may have several; llama.cpp's converter writes one, and llama.cpp stops at the
//! tokens of three keys and at tokens that it knows by their texts (`special_eog_ids` in src/llama-vocab.cpp).
//!
//! Here ends that neither covers take the two keys that are free, as far as they go. Where all of it still says
//! something else than the model, a key of quantkit's own holds the ends of the model.

use super::value::{Metadata, MetadataError, Text};

/// All ends of the model, where the three keys do not name exactly these.
const OWN_KEY: &str = "quantkit.eos_token_ids";
/// The keys at whose tokens llama.cpp stops: end of sequence, of a turn, of a message.
const KEYS: [&str; 3] = ["eos", "eot", "eom"];
/// Texts of ends of a turn: llama.cpp stops there, and takes one of them for EOT where no key names one. `</s>` and
/// `<eos>`, which it added later, are left out: older versions do not stop there.
const TURN_ENDS: [&str; 11] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];
/// The same for the end of a message.
const MESSAGE_END: &str = "<|eom_id|>";

fn key(kind: &str) -> String {
    format!("tokenizer.ggml.{kind}_token_id")
}

/// The tokens of the three keys, each once.
fn of_keys(metadata: &Metadata) -> Result<Vec<u32>, MetadataError> {
    let mut all = Vec::new();
    for kind in KEYS {
        let id = metadata.read::<u32>(&key(kind))?;
        all.extend(id.filter(|id| !all.contains(id)));
    }
    Ok(all)
}

/// The ends that a file names, each once.
pub(super) fn read(metadata: &Metadata) -> Result<Vec<u32>, MetadataError> {
    match metadata.read::<Vec<u32>>(OWN_KEY)? {
        Some(own) => Ok(own),
        None => of_keys(metadata),
    }
}

/// Adds `ends` to the keys of a vocabulary that has been written. Returns a warning about those at which llama.cpp will
/// not stop.
pub(super) fn write(metadata: &mut Metadata, ends: &[u32]) -> Result<Option<String>, MetadataError> {
    if ends.is_empty() {
        return Ok(None);
    }
    let tokens: Vec<Text> = metadata.need::<&[Text]>("tokenizer.ggml.tokens")?.to_vec();
    let text = |id: u32| tokens.get(id as usize).and_then(Text::as_str).unwrap_or_default();
    let eos = metadata.read::<u32>(&key("eos"))?;
    let has = |known: &[&str]| {
        let mut others = (0u32..).zip(&tokens).filter(|(id, _)| Some(*id) != eos);
        others.any(|(_, text)| text.as_str().is_some_and(|text| known.contains(&text)))
    };
    let (turn, message) = (has(&TURN_ENDS), has(&[MESSAGE_END]));
    let mut missed = Vec::new();
    for &id in ends {
        if of_keys(metadata)?.contains(&id) || TURN_ENDS.contains(&text(id)) || text(id) == MESSAGE_END {
            continue;
        }
        // A key of a kind that the vocabulary has by its text would displace that token, but for EOS, which has its own.
        let free = |kind: &str, by_text: bool| !by_text && metadata.get(&key(kind)).is_none();
        match (free("eot", turn), free("eom", message)) {
            (true, _) => metadata.set(key("eot"), id),
            (_, true) => metadata.set(key("eom"), id),
            _ => missed.push(id),
        }
    }
    let (mut named, mut wanted) = (of_keys(metadata)?, ends.to_vec());
    named.sort_unstable();
    wanted.sort_unstable();
    if named != wanted {
        metadata.set(OWN_KEY, ends.to_vec());
    }
    let listed: Vec<String> = missed.iter().map(|id| format!("{id} (`{}`)", text(*id))).collect();
    Ok((!missed.is_empty()).then(|| {
        format!(
            "the model ends a text at {} tokens, more than GGUF has keys for: llama.cpp will not stop at {}; quantkit \
             reads all of them from `{OWN_KEY}`",
            ends.len(),
            listed.join(", ")
        )
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn vocabulary(tokens: &[&str], eos: u32) -> Metadata {
        let mut metadata = Metadata::new();
        metadata.set("tokenizer.ggml.tokens", tokens.iter().map(|t| Text::from(*t)).collect::<Vec<_>>());
        metadata.set("tokenizer.ggml.eos_token_id", eos);
        metadata
    }

    fn ids(metadata: &Metadata) -> [Option<u32>; 3] {
        KEYS.map(|kind| metadata.read(&key(kind)).unwrap())
    }

    #[test]
    fn one_end_needs_no_more_keys() {
        let mut metadata = vocabulary(&["a", "</s>"], 1);
        assert_eq!(write(&mut metadata, &[1]), Ok(None));
        assert_eq!((ids(&metadata), metadata.get(OWN_KEY)), ([Some(1), None, None], None));
    }

    #[test]
    fn ends_without_a_known_text_take_the_free_keys() {
        let mut metadata = vocabulary(&["a", "b", "c", "d", "e"], 1);
        let warning = write(&mut metadata, &[1, 2, 3, 4]).unwrap().unwrap();
        assert_eq!(ids(&metadata), [Some(1), Some(2), Some(3)]);
        assert!(warning.contains("will not stop at 4 (`e`)"), "{warning}");
        assert_eq!(read(&metadata), Ok(vec![1, 2, 3, 4]));
        let mut metadata = vocabulary(&["a", "b", "c"], 1);
        assert_eq!(write(&mut metadata, &[1, 2]), Ok(None));
        assert_eq!((read(&metadata), metadata.get(OWN_KEY)), (Ok(vec![1, 2]), None));
    }

    #[test]
    fn ends_that_llama_cpp_knows_by_text_leave_its_keys_alone() {
        let llama = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "x"];
        let mut metadata = vocabulary(&llama, 2);
        assert_eq!(write(&mut metadata, &[2, 1, 0]), Ok(None));
        assert_eq!((ids(&metadata), read(&metadata)), ([Some(2), None, None], Ok(vec![2, 1, 0])));
        let mut metadata = vocabulary(&llama, 2);
        let warning = write(&mut metadata, &[2, 3]).unwrap().unwrap();
        assert!(warning.contains("will not stop at 3 (`x`)"), "{warning}");
    }
}
