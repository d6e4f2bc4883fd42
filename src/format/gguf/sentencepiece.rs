//! `tokenizer.model`: the pieces of a SentencePiece model. The file is a protocol buffer (sentencepiece's
//! `sentencepiece_model.proto`): field 1 of the message, repeated, is a piece with text (1), score (2) and kind (3).

use thiserror::Error;

/// A piece of the vocabulary; its place is its id.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    pub text: String,
    pub score: f32,
    pub kind: Kind,
}

/// What a piece is for. The numbers are those of GGUF's token types as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// Why a file is no SentencePiece model.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum PieceError {
    #[error("it breaks off at byte {0}")]
    Short(usize),
    #[error("byte {0} begins a field of a kind that protocol buffers do not have")]
    Wire(usize),
    #[error("piece {0} is not UTF-8")]
    Text(usize),
    #[error("piece {piece} is of kind {kind}; known are 1 to 6")]
    Kind { piece: usize, kind: u64 },
    #[error("it has no pieces")]
    Empty,
}

/// Reads the pieces of a model file.
pub fn pieces(bytes: &[u8]) -> Result<Vec<Piece>, PieceError> {
    let mut reader = Reader { bytes, at: 0 };
    let mut pieces = Vec::new();
    while let Some((field, value)) = reader.field()? {
        if let (1, Field::Bytes(inner)) = (field, value) {
            pieces.push(piece(inner, pieces.len())?);
        }
    }
    if pieces.is_empty() { Err(PieceError::Empty) } else { Ok(pieces) }
}

fn piece(bytes: &[u8], number: usize) -> Result<Piece, PieceError> {
    let mut reader = Reader { bytes, at: 0 };
    let mut piece = Piece { text: String::new(), score: 0.0, kind: Kind::Normal };
    while let Some((field, value)) = reader.field()? {
        match (field, value) {
            (1, Field::Bytes(text)) => {
                piece.text = std::str::from_utf8(text).map_err(|_| PieceError::Text(number))?.into();
            }
            (2, Field::Word(word)) => piece.score = f32::from_le_bytes(word),
            (3, Field::Number(kind)) => {
                piece.kind = match kind {
                    1 => Kind::Normal,
                    2 => Kind::Unknown,
                    3 => Kind::Control,
                    4 => Kind::UserDefined,
                    5 => Kind::Unused,
                    6 => Kind::Byte,
                    kind => return Err(PieceError::Kind { piece: number, kind }),
                };
            }
            _ => {}
        }
    }
    Ok(piece)
}

enum Field<'a> {
    Number(u64),
    Word([u8; 4]),
    Bytes(&'a [u8]),
    /// Eight bytes, which no field here has.
    Double,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], PieceError> {
        let short = PieceError::Short(self.bytes.len());
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..count)).ok_or(short)?;
        self.at += count;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64, PieceError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(PieceError::Wire(self.at))
    }

    fn field(&mut self) -> Result<Option<(u64, Field<'a>)>, PieceError> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let start = self.at;
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Field::Number(self.number()?),
            1 => self.take(8).map(|_| Field::Double)?,
            2 => {
                let length = usize::try_from(self.number()?).unwrap_or(usize::MAX);
                Field::Bytes(self.take(length)?)
            }
            5 => {
                let word = self.take(4)?;
                Field::Word([word[0], word[1], word[2], word[3]])
            }
            _ => return Err(PieceError::Wire(start)),
        };
        Ok(Some((tag >> 3, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read() {
        let bytes = [
            &[0x0a, 7, 0x0a, 5][..],
            b"<unk>",
            &[0x12, 0],
            &[0x0a, 10, 0x0a, 1, b'a', 0x15],
            &(-2.5f32).to_le_bytes(),
            &[0x18, 6],
        ]
        .concat();
        let found = pieces(&bytes).unwrap_or_default();
        assert_eq!(found[0], Piece { text: "<unk>".into(), score: 0.0, kind: Kind::Normal });
        assert_eq!(found[1], Piece { text: "a".into(), score: -2.5, kind: Kind::Byte });
    }

    #[test]
    fn damage_is_named() {
        assert_eq!(pieces(&[]), Err(PieceError::Empty));
        assert_eq!(pieces(&[0x0a, 7, 0x0a]), Err(PieceError::Short(3)));
        assert_eq!(
            pieces(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
            Err(PieceError::Short(11))
        );
        assert_eq!(pieces(&[0x0b]), Err(PieceError::Wire(0)));
        assert_eq!(pieces(&[0x0a, 3, 0x0a, 1, 0xff]), Err(PieceError::Text(0)));
        assert_eq!(pieces(&[0x0a, 2, 0x18, 9]), Err(PieceError::Kind { piece: 0, kind: 9 }));
    }
}
