//! Attention over fresh rows and over paged caches.

use super::super::tensor::Tensor;
use super::super::{AttentionShape, Done, KvCache, Span};
use super::batch::OnDevice;

/// See [`super::super::Backend::attention`]. Room in the caches has been reserved.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    batch: &OnDevice,
    spans: &[Span],
    shape: &AttentionShape,
    caches: Option<&mut [KvCache]>,
) -> Done<Tensor> {
    let _ = (k, v, batch, spans, shape, caches);
    Err(q.buffer().device().failed("to be written"))
}
