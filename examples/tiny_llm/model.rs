//! The model: two transformer blocks with grouped-query attention, and a draft head that is one block more.
//!
//! Weights are fixed pseudo-random numbers. Every position is computed by itself, in one order of additions, so the
//! bits of a result do not depend on how a prompt was cut into chunks: equal KV bytes give equal logit bits.

/// Width of the residual stream.
pub const DIM: usize = 24;
/// Query heads.
const HEADS: usize = 4;
/// Key and value heads; each serves `HEADS / KV_HEADS` query heads.
const KV_HEADS: usize = 2;
/// Width of a head.
const HEAD_DIM: usize = DIM / HEADS;
/// Floats of one K row, and of one V row.
pub const KV_DIM: usize = KV_HEADS * HEAD_DIM;
/// Blocks of the target model. The draft head's block is layer number `LAYERS`.
pub const LAYERS: usize = 2;
/// Hidden width of the feed-forward part.
const FFN: usize = 32;
/// Token ids are below this.
pub const VOCAB: u32 = 48;
/// Adapters; adapter 0 is none.
pub const ADAPTERS: usize = 2;
/// Positions that rotary embeddings are made for.
pub const POSITIONS_MAX: usize = 512;

/// Where K and V live. Rows go in one position at a time and come out from position 0 on.
pub trait Kv {
    /// Why a row could not be had.
    type Error;
    /// Writes the K row and the V row of one position.
    fn put(&mut self, layer: usize, position: usize, k: &[f32], v: &[f32]) -> Result<(), Self::Error>;
    /// Reads the rows of positions `0..positions`.
    fn read(&self, layer: usize, positions: usize, rows: &mut Rows) -> Result<(), Self::Error>;
}

/// K and V of some positions, `KV_DIM` floats each.
#[derive(Default)]
pub struct Rows {
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
}

/// A stretch of positions to compute.
pub struct Span<'a> {
    /// Tokens at `first..`.
    pub tokens: &'a [u32],
    /// Position of the first one.
    pub first: usize,
    /// K and V are written from this position on; before it they are read from where they lie.
    pub write_from: usize,
}

struct Matrix {
    cols: usize,
    data: Vec<f32>,
}

impl Matrix {
    fn mul(&self, x: &[f32]) -> Vec<f32> {
        self.data.chunks(self.cols).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }
}

struct Block {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    out: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

/// The weights.
pub struct Model {
    embedding: Matrix,
    adapters: Vec<Vec<f32>>,
    blocks: Vec<Block>,
    draft_in: Matrix,
    rotary: Vec<(f32, f32)>,
}

struct Dice(u64);

impl Dice {
    fn matrix(&mut self, rows: usize, cols: usize, gain: f32) -> Matrix {
        let scale = gain / (cols as f32).sqrt();
        let data = (0..rows * cols).map(|_| scale * self.unit()).collect();
        Matrix { cols, data }
    }

    /// Between -1 and 1; splitmix64.
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn block(&mut self) -> Block {
        Block {
            q: self.matrix(DIM, DIM, 2.0),
            k: self.matrix(KV_DIM, DIM, 2.0),
            v: self.matrix(KV_DIM, DIM, 2.0),
            out: self.matrix(DIM, DIM, 2.0),
            gate: self.matrix(FFN, DIM, 1.0),
            up: self.matrix(FFN, DIM, 1.0),
            down: self.matrix(DIM, FFN, 1.0),
        }
    }
}

impl Model {
    /// The one model there is.
    pub fn new() -> Model {
        let mut dice = Dice(2026);
        let angle = |i: usize| {
            let (position, pair) = (i / (HEAD_DIM / 2), i % (HEAD_DIM / 2));
            position as f32 / 50f32.powf(2.0 * pair as f32 / HEAD_DIM as f32)
        };
        Model {
            embedding: dice.matrix(VOCAB as usize, DIM, 4.0),
            adapters: (0..ADAPTERS)
                .map(|a| (0..DIM).map(|_| if a == 0 { 0.0 } else { dice.unit() }).collect())
                .collect(),
            blocks: (0..LAYERS).map(|_| dice.block()).collect(),
            // The draft sees the target's features faintly, so that it is right often but not always.
            draft_in: dice.matrix(DIM, DIM, 0.5),
            rotary: (0..POSITIONS_MAX * HEAD_DIM / 2).map(|i| angle(i).sin_cos()).collect(),
        }
    }

    /// Runs a span through the target model: the hidden state of each position.
    pub fn target<K: Kv>(
        &self,
        adapter: usize,
        kv: &mut K,
        span: &Span<'_>,
    ) -> Result<Vec<Vec<f32>>, K::Error> {
        let mut xs: Vec<Vec<f32>> = span.tokens.iter().map(|&t| self.embed(adapter, t)).collect();
        for (layer, block) in self.blocks.iter().enumerate() {
            self.block(block, layer, kv, &mut xs, span)?;
        }
        Ok(xs)
    }

    /// Runs a span through the draft head. `features[i]` is the target's hidden state of the position before
    /// `first + i`, so K and V of a position depend on nothing behind it and share the target's keys.
    pub fn draft<K: Kv>(
        &self,
        adapter: usize,
        kv: &mut K,
        span: &Span<'_>,
        features: &[Vec<f32>],
    ) -> Result<Vec<Vec<f32>>, K::Error> {
        let input = |(&t, feature): (&u32, &Vec<f32>)| {
            let mut x = self.embed(adapter, t);
            add(&mut x, &self.draft_in.mul(&norm(feature)));
            x
        };
        let mut xs: Vec<Vec<f32>> = span.tokens.iter().zip(features).map(input).collect();
        // The head shares the weights of the last block and has K and V of its own.
        self.block(&self.blocks[LAYERS - 1], LAYERS, kv, &mut xs, span)?;
        Ok(xs)
    }

    /// Scores of the next token.
    pub fn logits(&self, hidden: &[f32]) -> Vec<f32> {
        self.embedding.mul(&norm(hidden))
    }

    fn embed(&self, adapter: usize, token: u32) -> Vec<f32> {
        let row = token as usize * DIM;
        let mut x = self.embedding.data[row..row + DIM].to_vec();
        add(&mut x, &self.adapters[adapter]);
        x
    }

    fn block<K: Kv>(
        &self,
        block: &Block,
        layer: usize,
        kv: &mut K,
        xs: &mut [Vec<f32>],
        span: &Span<'_>,
    ) -> Result<(), K::Error> {
        let mut queries = Vec::with_capacity(xs.len());
        for (i, x) in xs.iter().enumerate() {
            let position = span.first + i;
            let n = norm(x);
            queries.push(self.rotated(block.q.mul(&n), position));
            if position >= span.write_from {
                kv.put(layer, position, &self.rotated(block.k.mul(&n), position), &block.v.mul(&n))?;
            }
        }
        let mut rows = Rows::default();
        kv.read(layer, span.first + xs.len(), &mut rows)?;
        for (i, (x, q)) in xs.iter_mut().zip(&queries).enumerate() {
            add(x, &block.out.mul(&attend(q, &rows, span.first + i + 1)));
            let n = norm(x);
            let silu = |g: f32| g / (1.0 + (-g).exp());
            let gated: Vec<f32> =
                block.gate.mul(&n).iter().zip(block.up.mul(&n)).map(|(g, u)| silu(*g) * u).collect();
            add(x, &block.down.mul(&gated));
        }
        Ok(())
    }

    fn rotated(&self, mut x: Vec<f32>, position: usize) -> Vec<f32> {
        let angles = &self.rotary[position * HEAD_DIM / 2..][..HEAD_DIM / 2];
        for head in x.chunks_mut(HEAD_DIM) {
            for (pair, (sin, cos)) in head.chunks_mut(2).zip(angles) {
                let (a, b) = (pair[0], pair[1]);
                (pair[0], pair[1]) = (a * cos - b * sin, a * sin + b * cos);
            }
        }
        x
    }
}

/// Attention of one query over the first `positions` rows.
fn attend(q: &[f32], rows: &Rows, positions: usize) -> Vec<f32> {
    let mut out = vec![0.0; DIM];
    for (head, (q, out)) in q.chunks(HEAD_DIM).zip(out.chunks_mut(HEAD_DIM)).enumerate() {
        let at = head * KV_HEADS / HEADS * HEAD_DIM;
        let row =
            |of: &[f32], p: usize| -> [f32; HEAD_DIM] { std::array::from_fn(|i| of[p * KV_DIM + at + i]) };
        let scale = 1.0 / (HEAD_DIM as f32).sqrt();
        let scores: Vec<f32> = (0..positions)
            .map(|p| scale * row(&rows.k, p).iter().zip(q).map(|(k, q)| k * q).sum::<f32>())
            .collect();
        let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
        let total: f32 = weights.iter().sum();
        for (p, w) in weights.iter().enumerate() {
            row(&rows.v, p).iter().zip(out.iter_mut()).for_each(|(v, o)| *o += w / total * v);
        }
    }
    out
}

fn norm(x: &[f32]) -> Vec<f32> {
    let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    let scale = 1.0 / (mean + 1e-6).sqrt();
    x.iter().map(|x| x * scale).collect()
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// The greedy choice. Equal scores: the smaller id.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, l) in logits.iter().enumerate() {
        if *l > logits[best] {
            best = i;
        }
    }
    best as u32
}
