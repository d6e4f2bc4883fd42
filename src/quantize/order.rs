//! The order in which GPTQ takes the columns of a weight.

use serde::{Deserialize, Serialize};

use crate::scheme::GroupSize;

/// Column orders. Errors are pushed to columns that come later, so the columns that matter most come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// As stored.
    Natural,
    /// By descending Hessian diagonal within each group, groups by their largest value: the file looks
    /// like `Natural`'s, so every consumer takes it (GPTQModel's act_group_aware).
    GroupAware,
    /// By descending Hessian diagonal over the whole row (`desc_act`).
    Activation,
}

/// A settled order: columns as they are taken, and the group of each.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// `columns[i]` is the column taken i-th.
    pub columns: Vec<usize>,
    /// `groups[i]` is its group.
    pub groups: Vec<usize>,
}

/// Settles `order` for the Hessian diagonal `diag`. With `static_groups`, or in any order but
/// `Activation`, groups are runs of stored columns; otherwise they are runs of the order itself.
pub fn sequence(order: Order, static_groups: bool, diag: &[f64], group_size: GroupSize) -> Sequence {
    let n = diag.len();
    let size = group_size.columns(n);
    let descending = |columns: &mut Vec<usize>| columns.sort_by(|&a, &b| diag[b].total_cmp(&diag[a]));
    let mut columns: Vec<usize> = (0..n).collect();
    match order {
        Order::Natural => {}
        Order::Activation => descending(&mut columns),
        Order::GroupAware => {
            let mut groups: Vec<Vec<usize>> = columns.chunks(size).map(<[usize]>::to_vec).collect();
            groups.iter_mut().for_each(descending);
            groups.sort_by(|a, b| diag[b[0]].total_cmp(&diag[a[0]]));
            columns = groups.concat();
        }
    }
    let groups = match order {
        Order::Activation if !static_groups => (0..n).map(|i| i / size).collect(),
        _ => columns.iter().map(|c| c / size).collect(),
    };
    Sequence { columns, groups }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders() {
        let diag = [1.0, 5.0, 2.0, 2.0, 9.0];
        let by = |order, fixed| sequence(order, fixed, &diag, GroupSize::new(2).unwrap_or(GroupSize::CHANNEL));
        assert_eq!(by(Order::Natural, false).columns, [0, 1, 2, 3, 4]);
        assert_eq!(
            by(Order::GroupAware, false),
            Sequence { columns: vec![4, 1, 0, 2, 3], groups: vec![2, 0, 0, 1, 1] }
        );
        assert_eq!(
            by(Order::Activation, false),
            Sequence { columns: vec![4, 1, 2, 3, 0], groups: vec![0, 0, 1, 1, 2] }
        );
        assert_eq!(by(Order::Activation, true).groups, [2, 0, 1, 1, 0]);
    }
}
