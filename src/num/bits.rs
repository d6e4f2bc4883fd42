//! Fields of 1 to 8 bits in a little-endian stream of 32-bit words; a field may straddle two words.
//! This one rule is the layout of GPTQ at 2, 3, 4 and 8 bits.

/// Words that hold `count` fields.
pub fn words(count: usize, bits: u8) -> usize {
    (count * bits as usize).div_ceil(32)
}

/// Field `index` of the stream whose word `w` is `word(w)`.
#[inline(always)]
pub fn get(word: impl Fn(usize) -> u32, index: usize, bits: u8) -> u8 {
    let at = index * bits as usize;
    let (w, shift) = (at / 32, at % 32);
    let mut value = word(w) >> shift;
    if shift + bits as usize > 32 {
        value |= word(w + 1) << (32 - shift);
    }
    (value & ((1 << bits) - 1)) as u8
}

/// Packs `values` into words; the last word is filled up with zeros.
pub fn pack(values: impl IntoIterator<Item = u8>, count: usize, bits: u8) -> Vec<u32> {
    let mut out = vec![0; words(count, bits)];
    for (i, value) in values.into_iter().take(count).enumerate() {
        let at = i * bits as usize;
        let (w, shift) = (at / 32, at % 32);
        let value = value as u32 & ((1 << bits) - 1);
        out[w] |= value << shift;
        if shift + bits as usize > 32 {
            out[w + 1] |= value >> (32 - shift);
        }
    }
    out
}

/// Reads `count` fields back.
pub fn unpack(packed: &[u32], count: usize, bits: u8) -> Vec<u8> {
    (0..count).map(|i| get(|w| packed[w], i, bits)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_words() {
        assert_eq!(pack(0..8, 8, 4), [0x7654_3210]);
        assert_eq!(pack((0..16).map(|i| i % 4), 16, 2), [0xE4E4_E4E4]);
        assert_eq!(pack(1..5, 4, 8), [0x0403_0201]);
        assert_eq!(pack((0..32).map(|i| i % 8), 32, 3), [0x88FA_C688, 0xC688_FAC6, 0xFAC6_88FA]);
    }

    proptest! {
        #[test]
        fn unpack_inverts_pack(bits in prop::sample::select(vec![2u8, 3, 4, 8]), raw in prop::collection::vec(any::<u8>(), 0..200)) {
            let values: Vec<u8> = raw.iter().map(|v| (*v as u16 & ((1 << bits) - 1)) as u8).collect();
            let packed = pack(values.iter().copied(), values.len(), bits);
            prop_assert_eq!(packed.len(), words(values.len(), bits));
            prop_assert_eq!(unpack(&packed, values.len(), bits), values);
        }
    }
}
