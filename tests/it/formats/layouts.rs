//! Every layout: what it stores comes back, whatever the shape; what it cannot store it says.

use half::f16;
use proptest::prelude::*;
use quantkit::backend::weight::Inputs;
use quantkit::format::awq::AwqLayout;
use quantkit::format::compressed::CompressedLayout;
use quantkit::format::fp8::Fp8Layout;
use quantkit::format::gptq::GptqLayout;
use quantkit::format::kind::{Form, InputsKind, Kind, Tile};
use quantkit::format::layout::{Layout, Solution, fitting};
use quantkit::pack::gptq::Version;
use quantkit::quantize::Quantized;

use super::folder::{DOWN, EIGHT, UP, floats, integers, read_back};
use super::{quantized, scheme};

fn weights(weight: &Quantized) -> Solution {
    Solution::Integers { weight: weight.clone(), inputs: Inputs::Float }
}

fn any_group() -> impl Strategy<Value = i32> {
    prop::sample::select(vec![-1, 16, 32, 48])
}

fn any_tile() -> impl Strategy<Value = Tile> {
    prop::sample::select(vec![Tile::Tensor, Tile::Channel, Tile::Block(128, 128), Tile::Block(16, 24)])
}

fn kind(inputs: Inputs) -> InputsKind {
    match inputs {
        Inputs::Float => InputsKind::Float,
        Inputs::Token => InputsKind::Token,
        Inputs::TokenAsymmetric => InputsKind::TokenAsymmetric,
        Inputs::Group(size) => InputsKind::Group(size),
        Inputs::Tensor { zero: 0, .. } => InputsKind::Tensor,
        Inputs::Tensor { .. } => InputsKind::TensorAsymmetric,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn gptq(
        bits in prop::sample::select(vec![2u8, 3, 4, 8]),
        group in any_group(),
        sym in any::<bool>(),
        (rows, cols) in (1usize..4, 1usize..4),
        seed in any::<u64>(),
    ) {
        let (base, cols) = (scheme(bits, group, sym), cols * 96);
        for version in [Version::V1, Version::V2] {
            let up = weights(&quantized(rows * 32, cols, base, false, seed));
            read_back(&GptqLayout { version }, &[(UP, base, up)]);
        }
    }

    #[test]
    fn awq(group in any_group(), sym in any::<bool>(), (rows, cols) in (1usize..9, 1usize..4), seed in any::<u64>()) {
        let (base, cols) = (scheme(4, group, sym), cols * 48);
        // What is symmetric and what is not may stand side by side.
        let other = scheme(4, group, !sym);
        let linears = [
            (UP, base, weights(&integers(rows * 8, cols, base, seed))),
            (DOWN, other, weights(&integers(rows * 16, cols * 2, other, seed ^ 1))),
        ];
        if base.group_size.divides(cols) {
            read_back(&AwqLayout, &linears);
        } else {
            prop_assert!(AwqLayout.check(rows * 8, cols, base).is_err());
        }
    }

    #[test]
    fn packed(
        bits in 2u8..9,
        (sym, other_sym) in any::<(bool, bool)>(),
        group in any_group(),
        (rows, cols) in (1usize..70, 1usize..4),
        seed in any::<u64>(),
    ) {
        // Outputs, and with one scale a channel inputs too, need not fill words.
        let (base, other) = (scheme(bits, group, sym), scheme(9 - bits.min(7), -1, other_sym));
        let cols = cols * 48;
        let linears = [
            (UP, base, weights(&integers(rows, cols, base, seed))),
            (DOWN, other, weights(&integers(rows + 3, cols + 5, other, seed ^ 1))),
        ];
        let layout = CompressedLayout { form: Form::Packed };
        if base.group_size.divides(cols) {
            read_back(&layout, &linears);
        } else {
            prop_assert!(layout.check(rows, cols, base).is_err());
        }
    }

    #[test]
    fn int8(
        inputs in prop::sample::select(vec![
            Inputs::Token,
            Inputs::TokenAsymmetric,
            Inputs::Tensor { scale: 0.03, zero: 0 },
            Inputs::Tensor { scale: 1.5, zero: -128 },
            Inputs::Tensor { scale: 1e-20, zero: 127 },
        ]),
        (rows, cols) in (1usize..70, 1usize..300),
        seed in any::<u64>(),
    ) {
        let up = Solution::Integers { weight: integers(rows, cols, EIGHT, seed), inputs };
        read_back(&CompressedLayout { form: Form::Int8(kind(inputs)) }, &[(UP, EIGHT, up)]);
    }

    #[test]
    fn float8(
        tile in any_tile(),
        inputs in prop::sample::select(vec![
            Inputs::Float,
            Inputs::Token,
            Inputs::Group(128),
            Inputs::Tensor { scale: 0.03, zero: 0 },
        ]),
        (rows, cols) in (1usize..300, 1usize..300),
        seed in any::<u64>(),
    ) {
        let up = Solution::Float8 { weight: floats(rows, cols, tile, seed), inputs };
        read_back(&CompressedLayout { form: Form::Float8 { tile, inputs: kind(inputs) } }, &[(UP, EIGHT, up.clone())]);
        let fp8 = Fp8Layout { tile, inputs: kind(inputs) };
        if fp8.check(rows, cols, EIGHT).is_ok() {
            read_back(&fp8, &[(UP, EIGHT, up)]);
        }
    }
}

#[test]
fn the_fp8_method_has_its_pairs() {
    let takes = |tile, inputs| Fp8Layout { tile, inputs }.check(64, 64, EIGHT).is_ok();
    let block = Tile::Block(128, 64);
    assert!(takes(Tile::Tensor, InputsKind::Token) && takes(Tile::Tensor, InputsKind::Tensor));
    assert!(takes(block, InputsKind::Group(64)));
    assert!(!takes(block, InputsKind::Group(128)) && !takes(block, InputsKind::Token));
    assert!(!takes(Tile::Channel, InputsKind::Token) && !takes(Tile::Tensor, InputsKind::Float));
    let up = |tile, inputs| Solution::Float8 { weight: floats(150, 200, tile, 5), inputs };
    for (tile, inputs) in [
        (Tile::Tensor, Inputs::Token),
        (Tile::Tensor, Inputs::Tensor { scale: 0.5, zero: 0 }),
        (block, Inputs::Group(64)),
    ] {
        read_back(&Fp8Layout { tile, inputs: kind(inputs) }, &[(UP, EIGHT, up(tile, inputs))]);
    }
}

#[test]
fn what_a_layout_cannot_hold_it_refuses() {
    let four = scheme(4, 16, true);
    let plain = integers(32, 32, four, 1);
    let mut scattered = plain.clone();
    scattered.g_idx.swap(0, 31);
    let mut huge = plain.clone();
    huge.scales[3] = f16::MAX;
    let rounded = Solution::Integers { weight: plain.clone(), inputs: Inputs::Token };
    let floating = Solution::Float8 { weight: floats(32, 32, Tile::Tensor, 1), inputs: Inputs::Token };
    let packed = CompressedLayout { form: Form::Packed };
    let int8 = CompressedLayout { form: Form::Int8(InputsKind::Tensor) };
    let fp8 = Fp8Layout { tile: Tile::Tensor, inputs: InputsKind::Token };
    let channel = integers(32, 32, EIGHT, 1);
    let shifted = Solution::Integers { weight: channel.clone(), inputs: Inputs::Tensor { scale: 1.0, zero: 3 } };
    let negative = Solution::Integers { weight: channel, inputs: Inputs::Tensor { scale: -1.0, zero: 0 } };
    let layouts: [(&dyn Layout, Solution, &str); 11] = [
        (&AwqLayout, weights(&scattered), "AWQ holds only groups of neighbouring input channels"),
        (&packed, weights(&scattered), "compressed-tensors holds only groups"),
        (&AwqLayout, weights(&huge), "too large for f16, which scales of awq are"),
        (&AwqLayout, rounded.clone(), "cannot say how inputs are rounded"),
        (&packed, rounded, "cannot say how inputs are rounded"),
        (&AwqLayout, floating.clone(), "not floats of 8 bits"),
        (&GptqLayout { version: Version::V1 }, floating, "not floats of 8 bits"),
        (&fp8, weights(&plain), "holds floats of 8 bits, not integers"),
        (&int8, weights(&plain), "its inputs are Float, but the artifact is to say Tensor"),
        (&int8, shifted, "the artifact is to say Tensor"),
        (&int8, negative, "the scale of its inputs is -1"),
    ];
    for (layout, solution, part) in layouts {
        let error = layout.store(UP, &solution).err().unwrap();
        assert!(error.contains(part), "{error}");
    }
    let wrong_tile = Solution::Float8 { weight: floats(32, 32, Tile::Channel, 1), inputs: Inputs::Token };
    assert!(fp8.store(UP, &wrong_tile).err().unwrap().contains("tiles of 1 by 32"));
    let mut nothing = floats(32, 32, Tile::Tensor, 1);
    nothing.scales[0] = f32::NAN;
    let nothing = Solution::Float8 { weight: nothing, inputs: Inputs::Token };
    assert!(fp8.store(UP, &nothing).err().unwrap().contains("scales must be positive"));
    assert!(int8.check(32, 32, four).unwrap_err().contains("group size -1"));
    assert!(CompressedLayout { form: Form::Int8(InputsKind::Float) }.check(32, 32, EIGHT).is_err());
}

#[test]
fn group_sizes_that_would_do() {
    let sizes = |layout: &dyn Layout, rows, cols| -> Vec<i32> {
        fitting(layout, rows, cols, scheme(4, 128, true)).map(|s| s.group_size.raw()).collect()
    };
    assert_eq!(sizes(&AwqLayout, 24, 96), [32, 16]);
    assert_eq!(sizes(&AwqLayout, 20, 96), [0; 0]);
    assert_eq!(sizes(&CompressedLayout { form: Form::Packed }, 20, 96), [32, 16]);
    assert_eq!(sizes(&GptqLayout { version: Version::V1 }, 24, 1024), [1024, 512, 256, 128, 64, 32, 16]);
    assert_eq!(GptqLayout { version: Version::V2 }.kind(true), Kind::Gptq { version: Version::V2, desc_act: true });
}
