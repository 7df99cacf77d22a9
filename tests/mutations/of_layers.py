"""Mutations of layer patterns: Mamba, DeltaNet, attention, gated MLP, and their states."""

from tests.mutations import Mutation

ATTENTION = "lm/model/baseline_layers.py"
CHUNKS = "lm/model/delta.py"
DELTA = "lm/model/delta.py"
CHANNELS = "lm/model/delta.py"
SLSTM = "lm/model/baseline_layers.py"
LSTM = "lm/model/baseline_layers.py"
OF_LSTM = "tests/lm/model/test_lstm.py::"
DIAGONAL = "lm/model/diagonal.py"
PATTERNS = "lm/model/patterns.py"
PLAIN = "lm/model/baseline_layers.py"
STATE = "lm/model/state.py"
CONFIG = "lm/model/configuration_fprnn.py"
TESTS = "tests/lm/model/test_patterns.py::"
OF_DELTA = "tests/lm/model/test_delta.py::"
RECURRENCE = (OF_DELTA + "test_chunks_are_the_recurrence",)
PAPERS = (OF_DELTA + "test_the_layer_is_the_papers",)
LLAMA = (TESTS + "test_attention_is_llamas",)
BY_HAND = (TESTS + "test_attention_by_hand",)
MAMBA = (TESTS + "test_mamba_is_transformers_mamba",)
SEGMENTS = (TESTS + "test_segments_and_single_tokens_give_what_the_whole_gives",)
PADDING = (TESTS + "test_a_state_after_padding_goes_on_as_without",)
PACKED = (TESTS + "test_packed_documents_are_documents_alone",)

OF_CHANNELS = ("tests/lm/model/test_channel_delta.py",)
CHANNEL_RULE = (f"{OF_CHANNELS[0]}::test_the_rule_is_its_matrices",)
OF_SLSTM = ("tests/lm/model/test_slstm.py",)
M2RNN = "lm/model/diagonal.py"
OF_M2RNN = ("tests/lm/model/test_m2rnn.py",)
OF_MAMBA3 = ("tests/lm/model/test_mamba3.py",)
GOES_ON = (
    f"{OF_CHANNELS[0]}::test_padding_leaves_the_state_as_it_is_and_a_text_goes_on",
    *OF_MAMBA3,
)

MUTATIONS = [
    Mutation(
        "layers: RoPE turns the other way",
        ATTENTION,
        "[first * cos - second * sin, second * cos + first * sin]",
        "[first * cos + second * sin, second * cos + first * sin]",
        LLAMA,
    ),
    Mutation(
        "layers: RoPE's frequencies are of the whole head",
        ATTENTION,
        "dtype=wide) / half",
        "dtype=wide) / (2 * half)",
        LLAMA,
    ),
    Mutation(
        "layers: the window has a token more",
        ATTENTION,
        "seen &= distance < self.config.attention_window",
        "seen &= distance <= self.config.attention_window",
        BY_HAND,
    ),
    Mutation(
        "layers: the window's cache has a token less",
        ATTENTION,
        "key_positions >= self.config.attention_window",
        "key_positions >= self.config.attention_window - 1",
        SEGMENTS,
    ),
    Mutation(
        "layers: attention looks into other documents",
        ATTENTION,
        "seen &= document.unsqueeze(2) == of_key.unsqueeze(1)",
        "seen &= document.unsqueeze(2) >= of_key.unsqueeze(1)",
        BY_HAND,
    ),
    Mutation(
        "layers: attention's cache keeps documents that are over",
        ATTENTION,
        "key_positions = key_positions.masked_fill(over, UNSEEN)",
        "key_positions = key_positions.masked_fill(over & False, UNSEEN)",
        PACKED,
    ),
    Mutation(
        "layers: padding counts as a position",
        ATTENTION,
        "next_position = positions[:, 0] + seqs.mask.sum(1)",
        "next_position = positions[:, -1] + 1",
        PADDING,
    ),
    Mutation(
        "layers: attention looks at padding",
        ATTENTION,
        "return positions if seqs.mask is None else positions.masked_fill(~seqs.mask, UNSEEN)",
        "return positions",
        PADDING,
    ),
    Mutation(
        "layers: Mamba's gate is a sigmoid",
        DIAGONAL,
        "return self.out_proj(o.to(z.dtype) * F.silu(z)), self._end(h, tail)",
        "return self.out_proj(o.to(z.dtype) * F.sigmoid(z)), self._end(h, tail)",
        MAMBA,
    ),
    Mutation(
        "layers: Mamba-2's gate comes after its norm",
        DIAGONAL,
        "o = self.norm(o.flatten(-2))",
        "o = self.norm(o.flatten(-2) / F.silu(z)) * F.silu(z)",
        MAMBA,
    ),
    Mutation(
        "layers: Mamba's state passes into the next document",
        DIAGONAL,
        "return None if seqs.starts is None else 1 - seqs.starts.to(dtype)",
        "return None",
        PACKED,
    ),
    Mutation(
        "layers: Mamba's convolution forgets the segment before",
        DIAGONAL,
        "return self.conv1d(x, segments, before), tail",
        "return self.conv1d(x, segments, None), tail",
        SEGMENTS,
    ),
    Mutation(
        "layers: the delta rule writes with the other sign",
        CHUNKS,
        "u = fresh[:, i] - W[:, i] @ S.transpose(-1, -2)",
        "u = fresh[:, i] + W[:, i] @ S.transpose(-1, -2)",
        RECURRENCE,
    ),
    Mutation(
        "layers: a chunk's steps of the delta rule see each other without β",
        CHUNKS,
        "between * B  #",
        "between  #",
        RECURRENCE,
    ),
    Mutation(
        "layers: the delta rule's gate acts at every step of a token",
        CHUNKS,
        "steps[:, :, 0] = log_alpha",
        "steps[:] = log_alpha.unsqueeze(2)",
        RECURRENCE,
    ),
    Mutation(
        "layers: a document of the delta rule starts after its first step",
        CHUNKS,
        "keep[:, :, 0] = ~starts",
        "keep[:, :, -1] = ~starts",
        RECURRENCE,
    ),
    Mutation(
        "layers: the delta rule is read before a token's last step",
        CHUNKS,
        "last = slice(n - 1, None, n)",
        "last = slice(0, None, n)",
        RECURRENCE,
    ),
    Mutation(
        "layers: few tokens of the delta rule go on in the document before",
        CHUNKS,
        "log_alpha = log_alpha.masked_fill(starts.unsqueeze(-1), -torch.inf)",
        "log_alpha = log_alpha.masked_fill(starts.unsqueeze(-1), 0)",
        (OF_DELTA + "test_few_tokens_are_the_same",),
    ),
    Mutation(
        "layers: padding writes into the delta rule's state",
        DELTA,
        "beta = seqs.masked(self.b_proj(u).to(wide).sigmoid()).unflatten",
        "beta = (self.b_proj(u).to(wide).sigmoid()).unflatten",
        (OF_DELTA + "test_a_step_of_padding_leaves_the_state_as_it_is",),
    ),
    Mutation(
        "layers: the delta rule forgets at padding",
        DELTA,
        "log_alpha = seqs.masked(-self.A_log.to(wide).exp() * dt)",
        "log_alpha = -self.A_log.to(wide).exp() * dt",
        (OF_DELTA + "test_a_step_of_padding_leaves_the_state_as_it_is",),
    ),
    Mutation(
        "layers: an LSTM's document goes on from the one before",
        LSTM,
        "h, c = h * goes_on, c * goes_on",
        "pass",
        (OF_LSTM + "test_a_document_starts_from_zero_and_padding_leaves_the_state_alone",),
    ),
    Mutation(
        "layers: a row of padding overwrites an LSTM's state",
        LSTM,
        "torch.where(some, new_h, h), torch.where(some, new_c, c)",
        "new_h, new_c",
        (OF_LSTM + "test_a_row_of_padding_keeps_its_state",),
    ),
    Mutation(
        "layers: the delta rule's queries are not scaled",
        DELTA,
        "q = unit(q.unflatten(-1, (h, -1))) * (self.config.d_model // h) ** -0.5",
        "q = unit(q.unflatten(-1, (h, -1)))",
        PAPERS,
    ),
    Mutation(
        "layers: negative eigenvalues are not doubled",
        DELTA,
        "beta = 2 * beta\n        log_alpha",
        "beta = 1 * beta\n        log_alpha",
        PAPERS,
    ),
    Mutation(
        "layers: the delta rule's convolutions forget the segment before",
        DELTA,
        "made.append(conv1d(x, segments, before))",
        "made.append(conv1d(x, segments, None))",
        SEGMENTS,
    ),
    Mutation(
        "layers: the MLP's gate is its other half",
        PLAIN,
        "F.silu(gate) * up",
        "gate * F.silu(up)",
        (TESTS + "test_the_mlp_is_llamas",),
    ),
    Mutation(
        "layers: options of a layer are dropped",
        CONFIG,
        "setattr(own, name, value)\n        try:",
        "pass\n        try:",
        (TESTS + "test_an_option_is_of_its_layer_alone",),
    ),
    Mutation(
        "layers: the state of another model is taken",
        STATE,
        "if not same:",
        "if False:",
        (TESTS + "test_a_state_of_another_model_is_refused",),
    ),
    Mutation(
        "layers: a pattern that does not fit is cut",
        PATTERNS,
        "if n_layer % len(pattern):",
        "if n_layer < len(pattern):",
        (TESTS + "test_what_cannot_be_is_refused",),
    ),
    Mutation(
        "layers: the channel delta rule reads before it writes",
        CHANNELS,
        "        o.append(torch.bmm(S, q_t))",
        "        o.append(torch.bmm(moved, q_t))",
        CHANNEL_RULE,
    ),
    Mutation(
        "layers: a document of the channel delta rule goes on from the one before",
        CHANNELS,
        "w, a = w * goes_on, a * goes_on",
        "w = w * goes_on",
        CHANNEL_RULE,
    ),
    Mutation(
        "layers: KDA takes off along what the decay left out",
        CHANNELS,
        "-beta * alpha * k, k, k, beta * v",
        "-beta * k, k, k, beta * v",
        OF_CHANNELS,
    ),
    Mutation(
        "layers: KDA writes whatever β",
        CHANNELS,
        "k, k, beta * v, state",
        "k, k, v, state",
        OF_CHANNELS,
    ),
    Mutation(
        "layers: RWKV-7 adds where it should take off",
        CHANNELS,
        "r, log_w.exp(), -read, a * read",
        "r, log_w.exp(), read, a * read",
        OF_CHANNELS,
    ),
    Mutation(
        "layers: RWKV-7 writes its key as it is read",
        CHANNELS,
        "k = k * (1 + (a - 1) * self.k_a.to(wide).view(h, -1))",
        "k = k * self.k_a.to(wide).view(h, -1)",
        OF_CHANNELS,
    ),
    Mutation(
        "layers: RWKV-7 forgets the token before a segment",
        CHANNELS,
        'change = shift(u, seqs, "u") - u',
        'change = shift(u, seqs._replace(state=None), "u") - u',
        OF_CHANNELS,
    ),
    Mutation(
        "layers: RWKV-7 forgets at padding",
        CHANNELS,
        "log_w = seqs.masked(-math.exp(-0.5) * self.w_lora",
        "log_w = (-math.exp(-0.5) * self.w_lora",
        OF_CHANNELS,
    ),
    Mutation(
        "layers: sLSTM's normaliser does not decay",
        SLSTM,
        "n = f * n + i",
        "n = n + i",
        OF_SLSTM,
    ),
    Mutation(
        "layers: sLSTM's stabiliser changes the input gate alone",
        SLSTM,
        "f = torch.exp(kept - new_m)",
        "f = torch.exp(kept - m)",
        OF_SLSTM,
    ),
    Mutation(
        "layers: sLSTM's cell reads the convolution",
        SLSTM,
        "torch.stack([convolved, convolved, u, u])",
        "torch.stack([convolved, convolved, convolved, u])",
        OF_SLSTM,
    ),
    Mutation(
        "layers: sLSTM's document goes on from the one before",
        SLSTM,
        "state = [torch.where(begins, new, old) for new, old in zip(fresh, state)]",
        "pass",
        OF_CHANNELS,
    ),
    Mutation(
        "layers: M²RNN's gate lets in what it keeps out",
        M2RNN,
        "f * H + (1 - f) * torch.tanh",
        "(1 - f) * H + f * torch.tanh",
        OF_M2RNN,
    ),
    Mutation(
        "layers: M²RNN writes outside of the tanh",
        M2RNN,
        "torch.tanh(H @ W + written)",
        "(torch.tanh(H @ W) + written)",
        OF_M2RNN,
    ),
    Mutation(
        "layers: M²RNN moves with the transposed matrix",
        M2RNN,
        "H @ W + written",
        "H @ W.mT + written",
        OF_M2RNN,
    ),
    Mutation(
        "layers: M²RNN's document goes on from the one before",
        M2RNN,
        "H = H * ~starts[:, t, None, None, None]",
        "pass",
        OF_CHANNELS,
    ),
    Mutation(
        "layers: M²RNN's padding decays the state",
        M2RNN,
        "forget = seqs.masked(self._rates(wide) * dt).exp()",
        "forget = (self._rates(wide) * dt).exp()",
        GOES_ON,
    ),
    Mutation(
        "layers: Mamba-3 turns the other way",
        DIAGONAL,
        "[first * cos - second * sin, first * sin + second * cos]",
        "[first * cos - second * sin, second * cos - first * sin]",
        OF_MAMBA3,
    ),
    Mutation(
        "layers: Mamba-3's angles are not of the step",
        DIAGONAL,
        "turn = dt.unsqueeze(-1) * math.pi",
        "turn = math.pi",
        OF_MAMBA3,
    ),
    Mutation(
        "layers: Mamba-3 is Euler's rule",
        DIAGONAL,
        "weight = dt - again + follows",
        "weight = dt + 0 * follows",
        OF_MAMBA3,
    ),
    Mutation(
        "layers: a token of Mamba-3 reads what only the next one writes",
        DIAGONAL,
        "own = self.D.to(wide) - follows * (key * query).sum(-1)",
        "own = self.D.to(wide)",
        OF_MAMBA3,
    ),
    Mutation(
        "layers: a text that goes on does not write Mamba-3's last token again",
        DIAGONAL,
        "return h + again[:, 0, :, None, None] * x.unsqueeze(-1) * key.unsqueeze(-2)",
        "return h",
        GOES_ON,
    ),
    Mutation(
        "layers: a text that goes on starts Mamba-3's angles anew",
        DIAGONAL,
        "angle = angle + before.to(wide).unsqueeze(1)",
        "pass",
        GOES_ON,
    ),
]
