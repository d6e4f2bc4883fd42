//! Which blocks of a pool belong to which sequence: bookkeeping alone. Any free block serves, so that there is no
//! fragmentation; a sequence wastes at most the end of its last block.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use thiserror::Error;

use crate::backend::cache::BLOCK;

/// A sequence in a cache; no other gets the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(u64);

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// Why a sequence cannot be changed as asked. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BlockError {
    #[error("{0} is not in the key-value cache")]
    Unknown(SeqId),
    #[error("{0} has been swapped out of the key-value cache")]
    SwappedOut(SeqId),
    #[error("{0} is named twice for one pass")]
    Twice(SeqId),
    #[error("{sequence} would have {tokens} tokens; the key-value cache was made for {capacity} a sequence")]
    TooLong { sequence: SeqId, tokens: usize, capacity: usize },
    #[error("{wanted} more blocks of {BLOCK} tokens are needed, and {free} of {all} of the key-value cache are free")]
    Full { wanted: usize, free: usize, all: usize },
    #[error("{wanted} blocks are to be swapped out, and there is room for {free} of {all} in the swap space")]
    SwapFull { wanted: usize, free: usize, all: usize },
}

#[derive(Clone, Debug)]
struct Sequence {
    tokens: usize,
    home: Home,
}

#[derive(Clone, Debug)]
enum Home {
    /// Its blocks in order.
    Pool(Vec<u32>),
    /// In host memory.
    Swap,
}

/// What is in a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Blocks of the pool.
    pub blocks: usize,
    /// Those that belong to sequences.
    pub used: usize,
    /// Tokens in them; shared ones once.
    pub tokens: usize,
    /// Blocks that the swap space can hold, and those it holds.
    pub swap_blocks: usize,
    pub swapped: usize,
}

impl Statistics {
    /// Share of the blocks in use that no token has.
    pub fn waste(&self) -> f64 {
        match self.used * BLOCK {
            0 => 0.0,
            slots => 1.0 - self.tokens as f64 / slots as f64,
        }
    }
}

/// The blocks of a pool and their owners.
#[derive(Clone, Debug)]
pub struct Blocks {
    free: Vec<u32>,
    /// How many sequences have each block.
    owners: Vec<u32>,
    swap_blocks: usize,
    swapped: usize,
    /// Most tokens of a sequence.
    capacity: usize,
    sequences: BTreeMap<SeqId, Sequence>,
    next: u64,
}

impl Blocks {
    /// A pool of `blocks` blocks, room for `swap_blocks` in host memory.
    pub fn new(blocks: usize, swap_blocks: usize, capacity: usize) -> Self {
        Self {
            free: (0..blocks as u32).rev().collect(),
            owners: vec![0; blocks],
            swap_blocks,
            swapped: 0,
            capacity,
            sequences: BTreeMap::new(),
            next: 0,
        }
    }

    /// Most tokens of a sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// How many blocks no sequence has.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// A new, empty sequence.
    pub fn add(&mut self) -> SeqId {
        self.insert(Sequence { tokens: 0, home: Home::Pool(Vec::new()) })
    }

    fn insert(&mut self, sequence: Sequence) -> SeqId {
        let id = SeqId(self.next);
        self.next += 1;
        self.sequences.insert(id, sequence);
        id
    }

    /// Another sequence with the same tokens so far. They share blocks until one of them writes.
    pub fn fork(&mut self, id: SeqId) -> Result<SeqId, BlockError> {
        let copy = Sequence { tokens: self.len(id)?, home: Home::Pool(self.table(id)?.to_vec()) };
        if let Home::Pool(blocks) = &copy.home {
            blocks.iter().for_each(|block| self.owners[*block as usize] += 1);
        }
        Ok(self.insert(copy))
    }

    /// Gives up a sequence, wherever it is.
    pub fn remove(&mut self, id: SeqId) -> Result<(), BlockError> {
        match self.sequences.remove(&id).ok_or(BlockError::Unknown(id))? {
            Sequence { home: Home::Pool(blocks), .. } => self.release(&blocks),
            Sequence { home: Home::Swap, tokens } => self.swapped -= tokens.div_ceil(BLOCK),
        }
        Ok(())
    }

    fn release(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            let owners = &mut self.owners[block as usize];
            *owners -= 1;
            if *owners == 0 {
                self.free.push(block);
            }
        }
    }

    /// Forgets all tokens but the first `len`.
    pub fn truncate(&mut self, id: SeqId, len: usize) -> Result<(), BlockError> {
        if len >= self.len(id)? {
            return Ok(());
        }
        let Sequence { tokens, home: Home::Pool(blocks) } = self.sequence_mut(id)? else {
            return Err(BlockError::SwappedOut(id));
        };
        *tokens = len;
        let given_up = blocks.split_off(len.div_ceil(BLOCK));
        self.release(&given_up);
        Ok(())
    }

    fn sequence(&self, id: SeqId) -> Result<&Sequence, BlockError> {
        self.sequences.get(&id).ok_or(BlockError::Unknown(id))
    }

    fn sequence_mut(&mut self, id: SeqId) -> Result<&mut Sequence, BlockError> {
        self.sequences.get_mut(&id).ok_or(BlockError::Unknown(id))
    }

    /// Tokens of a sequence.
    pub fn len(&self, id: SeqId) -> Result<usize, BlockError> {
        Ok(self.sequence(id)?.tokens)
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// The blocks of a sequence in order.
    pub fn table(&self, id: SeqId) -> Result<&[u32], BlockError> {
        match &self.sequence(id)?.home {
            Home::Pool(blocks) => Ok(blocks),
            Home::Swap => Err(BlockError::SwappedOut(id)),
        }
    }

    pub fn is_swapped_out(&self, id: SeqId) -> Result<bool, BlockError> {
        Ok(matches!(self.sequence(id)?.home, Home::Swap))
    }

    /// Blocks that are wanted for so many more tokens of each sequence.
    pub fn wanted(&self, more: &[(SeqId, usize)]) -> Result<usize, BlockError> {
        let mut named = BTreeSet::new();
        let mut owners: BTreeMap<u32, u32> = BTreeMap::new();
        let mut wanted = 0;
        for &(id, more) in more {
            if !named.insert(id) {
                return Err(BlockError::Twice(id));
            }
            let (len, table) = (self.len(id)?, self.table(id)?);
            let tokens = len.saturating_add(more);
            if tokens > self.capacity {
                return Err(BlockError::TooLong { sequence: id, tokens, capacity: self.capacity });
            }
            wanted += tokens.div_ceil(BLOCK) - table.len();
            if let Some(&block) = written(table, len, more) {
                let owners = owners.entry(block).or_insert(self.owners[block as usize]);
                if *owners > 1 {
                    *owners -= 1;
                    wanted += 1;
                }
            }
        }
        Ok(wanted)
    }

    /// Whether so many more tokens of each sequence fit.
    pub fn room(&self, more: &[(SeqId, usize)]) -> bool {
        self.wanted(more).is_ok_and(|wanted| wanted <= self.free.len())
    }

    /// Makes room for so many more tokens of each sequence, all or none. The contents of the first block of each pair
    /// are to be copied into the second, before anything is written: it was shared.
    pub fn grow(&mut self, more: &[(SeqId, usize)]) -> Result<Vec<(u32, u32)>, BlockError> {
        let wanted = self.wanted(more)?;
        if wanted > self.free.len() {
            return Err(BlockError::Full { wanted, free: self.free.len(), all: self.owners.len() });
        }
        let mut copies = Vec::new();
        for &(id, more) in more {
            let Some(Sequence { tokens, home: Home::Pool(table) }) = self.sequences.get_mut(&id) else { continue };
            let last = table.len().wrapping_sub(1);
            if let Some(&shared) = written(table, *tokens, more)
                && self.owners[shared as usize] > 1
                && let Some(own) = self.free.pop()
            {
                self.owners[shared as usize] -= 1;
                self.owners[own as usize] = 1;
                table[last] = own;
                copies.push((shared, own));
            }
            *tokens += more;
            while table.len() < tokens.div_ceil(BLOCK) {
                let Some(block) = self.free.pop() else { break };
                self.owners[block as usize] = 1;
                table.push(block);
            }
        }
        Ok(copies)
    }

    /// Marks a sequence as swapped out. Its former blocks, whose contents are to be saved now, are free.
    pub fn swap_out(&mut self, id: SeqId) -> Result<Vec<u32>, BlockError> {
        let blocks = self.table(id)?.to_vec();
        let (wanted, free) = (blocks.len(), self.swap_blocks - self.swapped);
        if wanted > free {
            return Err(BlockError::SwapFull { wanted, free, all: self.swap_blocks });
        }
        self.sequence_mut(id)?.home = Home::Swap;
        self.swapped += wanted;
        self.release(&blocks);
        Ok(blocks)
    }

    /// Blocks for a sequence that was swapped out, into which its contents are to be brought back now.
    pub fn swap_in(&mut self, id: SeqId) -> Result<Vec<u32>, BlockError> {
        if !self.is_swapped_out(id)? {
            return Ok(Vec::new());
        }
        let wanted = self.len(id)?.div_ceil(BLOCK);
        if wanted > self.free.len() {
            return Err(BlockError::Full { wanted, free: self.free.len(), all: self.owners.len() });
        }
        let blocks = self.free.split_off(self.free.len() - wanted);
        blocks.iter().for_each(|block| self.owners[*block as usize] = 1);
        self.sequence_mut(id)?.home = Home::Pool(blocks.clone());
        self.swapped -= wanted;
        Ok(blocks)
    }

    /// What is in use.
    pub fn statistics(&self) -> Statistics {
        let mut filled = vec![0; self.owners.len()];
        for Sequence { tokens, home } in self.sequences.values() {
            let Home::Pool(table) = home else { continue };
            for (i, block) in table.iter().enumerate() {
                let own = (tokens - i * BLOCK).min(BLOCK);
                let filled = &mut filled[*block as usize];
                *filled = own.max(*filled);
            }
        }
        Statistics {
            blocks: self.owners.len(),
            used: self.owners.len() - self.free.len(),
            tokens: filled.iter().sum(),
            swap_blocks: self.swap_blocks,
            swapped: self.swapped,
        }
    }
}

/// The block, if any, that has tokens already and gets some of `more`.
fn written(table: &[u32], len: usize, more: usize) -> Option<&u32> {
    if more > 0 && !len.is_multiple_of(BLOCK) { table.last() } else { None }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every block is free or owned, as often as it is counted, and what can be written has one owner.
    fn check(blocks: &Blocks) {
        let mut owners = vec![0; blocks.owners.len()];
        let mut swapped = 0;
        for Sequence { tokens, home } in blocks.sequences.values() {
            match home {
                Home::Pool(table) => {
                    assert_eq!(table.len(), tokens.div_ceil(BLOCK));
                    let own: BTreeSet<_> = table.iter().collect();
                    assert_eq!(own.len(), table.len(), "a block twice in one sequence");
                    table.iter().for_each(|block| owners[*block as usize] += 1);
                }
                Home::Swap => swapped += tokens.div_ceil(BLOCK),
            }
        }
        assert_eq!((&owners, swapped), (&blocks.owners, blocks.swapped));
        assert!(swapped <= blocks.swap_blocks);
        let mut free = blocks.free.clone();
        free.sort_unstable();
        let unowned: Vec<u32> = (0..owners.len() as u32).filter(|block| owners[*block as usize] == 0).collect();
        assert_eq!(free, unowned, "a block is lost, or free twice");
    }

    #[test]
    fn a_shared_block_is_copied_before_it_is_written() {
        let mut blocks = Blocks::new(5, 0, 100);
        let first = blocks.add();
        assert_eq!(blocks.grow(&[(first, 20)]), Ok(vec![]));
        let second = blocks.fork(first).unwrap();
        assert_eq!(blocks.table(first), blocks.table(second));
        assert_eq!(blocks.statistics(), Statistics { blocks: 5, used: 2, tokens: 20, ..Statistics::default() });
        // One copy serves both: the other one then is alone with the original.
        assert_eq!(blocks.wanted(&[(first, 1), (second, 1)]), Ok(1));
        let shared = blocks.table(first).unwrap()[1];
        let copies = blocks.grow(&[(first, 1), (second, 2)]).unwrap();
        assert_eq!(copies, [(shared, blocks.table(first).unwrap()[1])]);
        assert_eq!(blocks.table(second).unwrap()[1], shared);
        assert_eq!(blocks.table(first).unwrap()[0], blocks.table(second).unwrap()[0]);
        assert_eq!(blocks.grow(&[(first, 1)]), Ok(vec![]));
        check(&blocks);
        // A full block is never written again, and so not copied.
        blocks.truncate(first, 16).unwrap();
        let third = blocks.fork(first).unwrap();
        assert_eq!(blocks.grow(&[(third, 1), (first, 1)]), Ok(vec![]));
        check(&blocks);
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let mut blocks = Blocks::new(3, 1, 40);
        let (a, b) = (blocks.add(), blocks.add());
        blocks.grow(&[(a, 17), (b, 3)]).unwrap();
        let before = format!("{blocks:?}");
        assert_eq!(blocks.grow(&[(b, 13), (a, 16)]), Err(BlockError::Full { wanted: 1, free: 0, all: 3 }));
        assert_eq!(blocks.grow(&[(b, 1), (b, 1)]), Err(BlockError::Twice(b)));
        assert_eq!(blocks.grow(&[(b, 38)]), Err(BlockError::TooLong { sequence: b, tokens: 41, capacity: 40 }));
        assert!(blocks.grow(&[(b, usize::MAX)]).is_err());
        assert_eq!(blocks.swap_out(a), Err(BlockError::SwapFull { wanted: 2, free: 1, all: 1 }));
        assert_eq!(before, format!("{blocks:?}"));
        blocks.swap_out(b).unwrap();
        assert_eq!(blocks.grow(&[(b, 1)]), Err(BlockError::SwappedOut(b)));
        assert_eq!(blocks.truncate(b, 1), Err(BlockError::SwappedOut(b)));
        blocks.grow(&[(a, 16)]).unwrap();
        assert_eq!(blocks.swap_in(b), Err(BlockError::Full { wanted: 1, free: 0, all: 3 }));
        blocks.remove(a).unwrap();
        assert_eq!(blocks.len(a), Err(BlockError::Unknown(a)));
        assert_eq!(blocks.swap_in(b).map(|blocks| blocks.len()), Ok(1));
        check(&blocks);
    }

    /// Lengths of a served conversation model: many short, few long.
    #[test]
    fn waste_of_mixed_lengths_is_small() {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / (1u64 << 31) as f64
        };
        let mut blocks = Blocks::new(4096, 0, 2048);
        let mut running: Vec<(SeqId, usize)> = Vec::new();
        let (mut used, mut wasted, mut worst) = (0.0, 0.0, 0.0f64);
        for step in 0..20_000 {
            // A request every eighth step: 100 to 1000 tokens of prompt, up to 2000 in all.
            if step % 8 == 0 {
                let prompt = (100.0 * 10f64.powf(next())) as usize;
                let total = prompt + (20.0 * 50f64.powf(next())) as usize;
                let id = blocks.add();
                match blocks.grow(&[(id, prompt)]) {
                    Ok(_) => running.push((id, total)),
                    Err(_) => blocks.remove(id).unwrap(),
                }
            }
            for &(id, _) in &running {
                blocks.grow(&[(id, 1)]).unwrap();
            }
            let done = |blocks: &Blocks, &(id, total): &(SeqId, usize)| blocks.len(id).unwrap() >= total;
            let (finished, rest): (Vec<_>, Vec<_>) = running.iter().partition(|entry| done(&blocks, entry));
            finished.into_iter().for_each(|(id, _)| blocks.remove(id).unwrap());
            running = rest;
            if step > 1000 {
                let now = blocks.statistics();
                used += (now.used * BLOCK) as f64;
                wasted += (now.used * BLOCK - now.tokens) as f64;
                worst = worst.max(now.waste());
            }
        }
        check(&blocks);
        assert!(running.len() > 10, "{}", running.len());
        assert!(wasted / used < 0.02 && worst < 0.04, "{} on average, {worst} at most", wasted / used);
    }

    #[derive(Clone, Debug)]
    enum Action {
        Add,
        Fork(usize),
        Remove(usize),
        Truncate(usize, usize),
        Grow(Vec<(usize, usize)>),
        Out(usize),
        In(usize),
    }

    fn action() -> impl Strategy<Value = Action> {
        let any = 0..8usize;
        prop_oneof![
            Just(Action::Add),
            any.clone().prop_map(Action::Fork),
            any.clone().prop_map(Action::Remove),
            (any.clone(), 0..80usize).prop_map(|(i, len)| Action::Truncate(i, len)),
            prop::collection::vec((any.clone(), 0..40usize), 1..4).prop_map(Action::Grow),
            prop::collection::vec((any.clone(), 0..40usize), 1..4).prop_map(Action::Grow),
            any.clone().prop_map(Action::Out),
            any.prop_map(Action::In),
        ]
    }

    proptest! {
        /// The tokens of every sequence stay what was written, however blocks are shared, copied and moved.
        #[test]
        fn nothing_is_lost_and_nothing_shared_is_written(actions in prop::collection::vec(action(), 1..120)) {
            let mut blocks = Blocks::new(12, 6, 100);
            // What each slot of the pool holds, what each sequence should, and what is swapped out.
            let mut memory = [[0u32; BLOCK]; 12];
            let mut wanted: Vec<(SeqId, Vec<u32>)> = Vec::new();
            let mut away: BTreeMap<SeqId, Vec<[u32; BLOCK]>> = BTreeMap::new();
            let mut token = 0;
            for action in actions {
                let n = wanted.len().max(1);
                let of = |i: usize| wanted.get(i % n).map(|(id, _)| *id);
                match action {
                    Action::Add => wanted.push((blocks.add(), Vec::new())),
                    Action::Fork(i) => {
                        if let Some(Ok(id)) = of(i).map(|id| blocks.fork(id)) {
                            wanted.push((id, wanted[i % n].1.clone()));
                        }
                    }
                    Action::Remove(i) => {
                        if let Some(id) = of(i) {
                            blocks.remove(id).unwrap();
                            away.remove(&id);
                            wanted.remove(i % n);
                        }
                    }
                    Action::Truncate(i, len) => {
                        if let Some(Ok(())) = of(i).map(|id| blocks.truncate(id, len)) {
                            wanted[i % n].1.truncate(len);
                        }
                    }
                    Action::Grow(parts) => {
                        let more: Vec<_> = parts.iter().filter_map(|&(i, m)| of(i).map(|id| (id, m))).collect();
                        let (room, before) = (blocks.room(&more), blocks.clone());
                        let Ok(copies) = blocks.grow(&more) else {
                            prop_assert!(!room);
                            prop_assert_eq!(format!("{:?}", before), format!("{blocks:?}"));
                            continue;
                        };
                        prop_assert!(room);
                        for (from, to) in copies {
                            memory[to as usize] = memory[from as usize];
                        }
                        for (id, m) in more {
                            let (len, table) = (blocks.len(id).unwrap(), blocks.table(id).unwrap());
                            let own = &mut wanted.iter_mut().find(|(own, _)| *own == id).unwrap().1;
                            for at in len - m..len {
                                token += 1;
                                own.push(token);
                                memory[table[at / BLOCK] as usize][at % BLOCK] = token;
                                prop_assert_eq!(blocks.owners[table[at / BLOCK] as usize], 1);
                            }
                        }
                    }
                    Action::Out(i) => {
                        if let Some(Ok(freed)) = of(i).map(|id| blocks.swap_out(id)) {
                            away.insert(of(i).unwrap(), freed.iter().map(|block| memory[*block as usize]).collect());
                        }
                    }
                    Action::In(i) => {
                        let Some(id) = of(i) else { continue };
                        if let Ok(taken) = blocks.swap_in(id) {
                            for (block, held) in taken.iter().zip(away.remove(&id).unwrap_or_default()) {
                                memory[*block as usize] = held;
                            }
                        }
                    }
                }
                check(&blocks);
                for (id, tokens) in &wanted {
                    prop_assert_eq!(blocks.len(*id), Ok(tokens.len()));
                    if let Ok(table) = blocks.table(*id) {
                        let held = tokens.iter().enumerate().all(|(i, t)| memory[table[i / BLOCK] as usize][i % BLOCK] == *t);
                        prop_assert!(held, "{} has lost tokens", id);
                    }
                }
            }
        }
    }
}
