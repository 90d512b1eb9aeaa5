//! Pictures of a tree, for people.

use std::fmt::Write as _;

use super::Tree;
use super::node::{NIL, Node, ROOT, Residency};

fn mark(state: Residency, letter: char) -> char {
    match state {
        Residency::Absent => '-',
        Residency::Pending => letter.to_ascii_lowercase(),
        Residency::Present => letter,
    }
}

/// `DH 4p [1 2 3 ..] locks 1 ...`: upper case is there, lower case is under way.
fn describe(tree: &Tree, at: u32, node: &Node) -> String {
    // A dump is made of broken trees too.
    let from = node.from as usize * tree.page_size as usize;
    let tokens = tree.arena.run_tokens(node.run).get(from..).unwrap_or(&[]);
    let tokens = &tokens[..tokens.len().min(node.pages as usize * tree.page_size as usize)];
    let shown: Vec<String> = tokens.iter().take(4).map(u32::to_string).collect();
    let more = if tokens.len() > 4 { " .." } else { "" };
    let mut text = format!(
        "{} {}{} {}p [{}{more}]",
        tree.arena.id(at),
        mark(node.device, 'D'),
        mark(node.host, 'H'),
        node.pages,
        shown.join(" "),
    );
    for (name, value) in [("locks", node.locks), ("pins", node.pins), ("hits", node.hits)] {
        if value > 0 {
            let _ = write!(text, " {name} {value}");
        }
    }
    for op in [node.op, tree.ops.storing(at)] {
        if op != NIL && tree.ops.is_live(op) {
            let _ = write!(text, " {:?}", tree.ops.get(op).id);
        }
    }
    text
}

impl Tree {
    /// One line per node, indented by level, children in creation order (newest first). O(nodes).
    #[must_use]
    pub fn dump_text(&self) -> String {
        let mut text = String::from("root\n");
        self.for_each_node(|tree, at, level| {
            let node = &tree.arena.nodes[at as usize];
            let _ = writeln!(text, "{:width$}{}", "", describe(tree, at, node), width = 2 * level);
        });
        text
    }

    /// Graphviz source: one box per node, dashed where the node is not on the device. O(nodes).
    #[must_use]
    pub fn dump_dot(&self) -> String {
        let mut text = String::from("digraph tree {\n  node [shape=box];\n  n0 [label=\"root\"];\n");
        self.for_each_node(|tree, at, _| {
            let node = &tree.arena.nodes[at as usize];
            let style = if node.device == Residency::Present { "solid" } else { "dashed" };
            let _ = writeln!(text, "  n{at} [label=\"{}\" style={style}];", describe(tree, at, node));
            let _ = writeln!(text, "  n{} -> n{at};", node.parent);
        });
        text.push_str("}\n");
        text
    }

    /// Depth first. Stops after as many steps as there are slots, so a circle cannot hang it.
    fn for_each_node(&self, mut f: impl FnMut(&Tree, u32, usize)) {
        let mut stack = vec![(self.arena.nodes[ROOT as usize].first_child, 1)];
        let mut steps = self.arena.nodes.len();
        while let Some((at, level)) = stack.pop() {
            if at == NIL || steps == 0 {
                continue;
            }
            steps -= 1;
            f(self, at, level);
            let node = &self.arena.nodes[at as usize];
            stack.push((node.sibling.newer, level));
            stack.push((node.first_child, level + 1));
        }
    }
}
