//! Rotary embedding: which frequencies a config asks for. Sources: RoFormer (2104.09864), Llama 3.1's
//! frequency-wise scaling, YaRN (2309.00071).

use std::f64::consts::PI;

use super::config_error::ConfigError;
use super::families::Family;
use crate::checkpoint::{JsonKeys, KeyError};

/// Frequencies of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians per position, one for each pair of channels.
    pub inv_freq: Vec<f32>,
    /// Multiplies cosine and sine (YaRN's attention factor).
    pub factor: f32,
    /// The base of the frequencies, before any scaling.
    pub theta: f64,
    pub scaling: Scaling,
}

/// How frequencies are changed for longer texts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    None,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        /// Positions the model was first trained on.
        original: f64,
    },
    Yarn(Yarn),
}

/// YaRN as the config spells it; what it leaves out has a default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    /// Positions the model was first trained on.
    pub original: f64,
    pub attention_factor: Option<f64>,
    pub beta_fast: Option<f64>,
    pub beta_slow: Option<f64>,
    pub mscale: Option<f64>,
    pub mscale_all_dim: Option<f64>,
    pub truncate: bool,
    /// Whether the config names `extrapolation_factor` and `attn_factor`, which can only be 1.
    pub extrapolation_given: bool,
    pub attn_given: bool,
}

impl Rope {
    /// Cosines and sines for `positions` positions, `[positions, frequencies]` each.
    pub fn table(&self, positions: usize) -> [Vec<f32>; 2] {
        let angle = |p: usize| self.inv_freq.iter().map(move |f| (p as f32 * f) as f64);
        [
            (0..positions).flat_map(|p| angle(p).map(|a| a.cos() as f32 * self.factor)).collect(),
            (0..positions).flat_map(|p| angle(p).map(|a| a.sin() as f32 * self.factor)).collect(),
        ]
    }

    fn turns_as(&self, other: &Rope) -> bool {
        self.inv_freq == other.inv_freq && self.factor == other.factor
    }
}

/// The ropes of a model: one, or with `local` two (full layers, sliding layers).
///
/// Configs written before transformers 5 have `rope_scaling`, and the base beside it; later ones have everything in
/// `rope_parameters`. Given both, transformers 5 and vLLM read the former, llama.cpp's converter the latter: they must
/// ask for the same. So must a value that is both inside and beside, where the order of preference differs by key. An
/// empty object counts as absent.
pub fn parse(
    keys: &JsonKeys,
    family: &Family,
    local: bool,
    head_dim: usize,
    max_positions: usize,
) -> Result<Vec<Rope>, ConfigError> {
    let read = |inside: Option<&JsonKeys>| {
        let outer = Outer { keys, family, head_dim, max_positions };
        outer.ropes(inside, local)
    };
    const PLACES: [&str; 2] = ["rope_scaling", "rope_parameters"];
    let [old, new] = PLACES.map(|key| keys.object(key).map(|found| found.filter(|object| !object.is_empty())));
    match (old?, new?) {
        (Some(old), Some(new)) => {
            let (one, other) = (read(Some(&old))?, read(Some(&new))?);
            match one.iter().zip(&other).all(|(a, b)| a.turns_as(b)) {
                true => Ok(one),
                false => Err(keys.contradiction(PLACES[0], keys, PLACES[1]).into()),
            }
        }
        (old, new) => Ok(read(old.or(new).as_ref())?),
    }
}

/// The config around the object with the parameters of rotation.
struct Outer<'a> {
    keys: &'a JsonKeys<'a>,
    family: &'a Family,
    head_dim: usize,
    max_positions: usize,
}

impl Outer<'_> {
    fn ropes(&self, inside: Option<&JsonKeys>, local: bool) -> Result<Vec<Rope>, KeyError> {
        const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
        let nested = inside.filter(|p| KINDS.iter().any(|kind| p.get(kind).is_some()));
        let (full, sliding) = match nested {
            Some(both) => {
                if let Some(stray) = both.names().find(|name| !KINDS.contains(name)) {
                    return Err(both.bad(stray, "only `full_attention` and `sliding_attention` are allowed here"));
                }
                let [full, sliding] = KINDS.map(|kind| both.object(kind));
                let (full, sliding) = (full?.ok_or_else(|| both.missing(KINDS[0]))?, sliding?);
                if local && sliding.is_none() {
                    return Err(both.missing(KINDS[1]));
                }
                (Some(full), sliding)
            }
            None => (inside.cloned(), None),
        };
        let defaults = &self.family.defaults;
        let mut ropes = vec![self.one(full.as_ref(), "rope_theta", defaults.rope_theta)?];
        if local {
            ropes.push(self.one(sliding.as_ref(), "rope_local_base_freq", defaults.local_rope_theta)?);
        } else if let (Some(both), Some(_)) = (nested, &sliding) {
            // All layers of this family turn alike.
            let sliding = self.one(sliding.as_ref(), "rope_theta", defaults.rope_theta)?;
            if !sliding.turns_as(&ropes[0]) {
                return Err(both.contradiction(KINDS[0], both, KINDS[1]));
            }
        }
        Ok(ropes)
    }

    /// A number that may be inside, as `key`, or beside, as `outer`.
    fn number(&self, inside: Option<&JsonKeys>, key: &str, outer: &str) -> Result<Option<f64>, KeyError> {
        let beside = self.keys.positive(outer)?;
        let Some(parameters) = inside else { return Ok(beside) };
        match (parameters.positive(key)?, beside) {
            (Some(one), Some(other)) if one != other => Err(parameters.contradiction(key, self.keys, outer)),
            (one, other) => Ok(one.or(other)),
        }
    }

    /// One kind of layer; its base is beside as `theta_key`.
    fn one(&self, inside: Option<&JsonKeys>, theta_key: &str, default_theta: f64) -> Result<Rope, KeyError> {
        let theta = self.number(inside, "rope_theta", theta_key)?.unwrap_or(default_theta);
        if theta <= 1.0 {
            let (keys, key) = match inside.filter(|keys| keys.get("rope_theta").is_some()) {
                Some(keys) => (keys, "rope_theta"),
                None => (self.keys, theta_key),
            };
            return Err(keys.bad(key, "a number above 1 is needed"));
        }
        let partial = self.number(inside, PARTIAL, PARTIAL)?.unwrap_or(1.0);
        if partial > 1.0 {
            let keys = inside.filter(|keys| keys.get(PARTIAL).is_some()).unwrap_or(self.keys);
            return Err(keys.bad(PARTIAL, "a share of at most 1 is needed"));
        }
        for keys in inside.into_iter().chain([self.keys]) {
            keys.count(ORIGINAL)?;
        }
        let original = self.number(inside, ORIGINAL, ORIGINAL)?.unwrap_or(self.max_positions as f64);
        let dim = (self.head_dim as f64 * partial) as usize / 2 * 2;
        let base: Vec<f64> = (0..dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim as f64)).collect();
        let scaling = match inside {
            Some(parameters) => Scaling::read(parameters, original)?,
            None => Scaling::None,
        };
        let (inv_freq, factor) = match scaling {
            Scaling::None => (base, 1.0),
            Scaling::Linear { factor } => (base.iter().map(|f| f / factor).collect(), 1.0),
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let scaled = |&f: &f64| llama3(f, factor, low_freq_factor, high_freq_factor, original);
                (base.iter().map(scaled).collect(), 1.0)
            }
            Scaling::Yarn(yarn) => yarn.frequencies(&base, dim, theta),
        };
        let inv_freq = inv_freq.into_iter().map(|f| f as f32).collect();
        Ok(Rope { inv_freq, factor: factor as f32, theta, scaling })
    }
}

const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";

impl Scaling {
    fn read(keys: &JsonKeys, original: f64) -> Result<Self, KeyError> {
        let need = |key: &str| keys.positive(key)?.ok_or_else(|| keys.bad(key, "a positive number is needed"));
        let (kind, key) = match (keys.text("rope_type")?, keys.text("type")?) {
            (Some(one), Some(other)) if one != other => return Err(keys.contradiction("rope_type", keys, "type")),
            (Some(kind), _) => (kind, "rope_type"),
            (None, kind) => (kind.unwrap_or("default"), "type"),
        };
        match kind {
            "default" => {
                // Without a type none of these has an effect, which is hardly what their author meant.
                for key in ["factor", "attention_factor", "low_freq_factor", "high_freq_factor"] {
                    if keys.number(key)?.is_some_and(|value| value != 1.0) {
                        let wanted =
                            "it has no effect without a `rope_type` such as `linear`; give the type or remove it";
                        return Err(keys.bad(key, wanted));
                    }
                }
                Ok(Scaling::None)
            }
            "linear" => Ok(Scaling::Linear { factor: need("factor")? }),
            "llama3" => Ok(Scaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original,
            }),
            "yarn" => Yarn::read(keys, need("factor")?, original).map(Scaling::Yarn),
            _ => Err(keys.bad(key, "known are default, linear, llama3, yarn")),
        }
    }
}

fn llama3(inv: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * PI / inv;
    if wavelength > original / low {
        inv / factor
    } else if wavelength < original / high {
        inv
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * inv / factor + smooth * inv
    }
}

impl Yarn {
    fn read(keys: &JsonKeys, factor: f64, original: f64) -> Result<Self, KeyError> {
        // vLLM multiplies by them, transformers does not know them.
        let one = |key: &str| match keys.number(key)? {
            Some(value) if value != 1.0 => Err(keys.bad(key, "not every program applies it, so only 1 is read")),
            given => Ok(given.is_some()),
        };
        Ok(Self {
            factor,
            original,
            attention_factor: keys.positive("attention_factor")?,
            beta_fast: keys.positive("beta_fast")?,
            beta_slow: keys.positive("beta_slow")?,
            mscale: keys.number("mscale")?,
            mscale_all_dim: keys.number("mscale_all_dim")?,
            truncate: keys.flag("truncate", true)?,
            extrapolation_given: one("extrapolation_factor")?,
            attn_given: one("attn_factor")?,
        })
    }

    /// Frequencies and the factor of cosine and sine.
    fn frequencies(&self, base: &[f64], dim: usize, theta: f64) -> (Vec<f64>, f64) {
        let Self { factor, original, .. } = *self;
        let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        let nonzero = |scale: Option<f64>| scale.filter(|n| *n != 0.0);
        let attention =
            self.attention_factor.unwrap_or_else(|| match (nonzero(self.mscale), nonzero(self.mscale_all_dim)) {
                (Some(one), Some(all)) => scale(one) / scale(all),
                _ => scale(1.0),
            });
        // The pair of channels that turns `r` times over the original context.
        let pair = |r: f64| dim as f64 * (original / (r * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(self.beta_fast.unwrap_or(32.0)), pair(self.beta_slow.unwrap_or(1.0)));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let blend = |(i, inv): (usize, &f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            inv / factor * ramp + inv * (1.0 - ramp)
        };
        (base.iter().enumerate().map(blend).collect(), attention)
    }
}
