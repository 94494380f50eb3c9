-- Candidates for eviction. A source of them has two functions. `next(most)` returns at most so many seqs, the
-- one that is to be evicted first in front; none at the end. `pass(used, stuck)` says how many of them the
-- caller has looked at, and how many of those were not evicted; the others come again.
--@include task

-- The first stored entry beyond `seq`; reading it costs its bytes.
local function stored_after(seq, last)
  local entry = redis.call('XRANGE', stream, '(' .. id_of(seq), '+', 'COUNT', 1)[1]
  return entry and seq_of(entry[1]) or last + 1
end

-- Candidates by arrival. Entries below `floor`, which the task keeps, are deleted or leased, and are not
-- looked at again; the sorted set behind holds those that were requeued since, by arrival. After a page of
-- looks, or of leased groups, the rest is left to the next call: `unseen` is set.
local unseen = false
local function oldest_candidates(last)
  local found, at, looks, leased, window = {}, 0, 0, 0, 4
  local before, behind -- of each candidate that `next` returned: `at` before it, and its member in behind
  local next_seq = number(task, 'floor')
  if next_seq == 0 then
    next_seq = stored_after(0, last)
  end

  local function look()
    local members, first = {}, next_seq
    next_seq = math.min(first + window, last + 1)
    for seq = first, next_seq - 1 do -- bound: PAGE.candidates_window
      members[#members + 1] = member_of(seq)
    end
    local facts = redis.call('HMGET', key('facts'), unpack(members))
    local stored = false
    for i = 1, #members do
      stored = stored or facts[i]
      if facts[i] then
        found[#found + 1] = first + i - 1
      end
    end
    if not stored and window == PAGE.candidates_window then -- a wide gap
      next_seq = stored_after(next_seq - 1, last)
    end
    looks, window = looks + #members, math.min(window * 2, PAGE.candidates_window)
  end

  local function note_floor()
    redis.call('HSET', task, 'floor', string.format('%.0f', found[at + 1] or next_seq))
  end

  local function next_ones(most)
    local seqs, known, requeued, place = {}, {}, {}, 1
    before, behind = {}, {}
    most = math.min(most, PAGE.candidates_leased - leased)
    if most > 0 and looks < PAGE.candidates then
      window = math.max(window, math.min(most, PAGE.candidates_window))
      requeued = redis.call('ZRANGE', key('behind'), 0, most - 1, 'WITHSCORES')
    end
    while #seqs < most do -- bound: PAGE.candidates looks, and PAGE.candidates_leased
      local seq, member, from = nil, nil, at
      if requeued[place] and tonumber(requeued[place + 1]) < (found[at + 1] or next_seq) then
        member, place = requeued[place], place + 2
        seq = tonumber(member)
      elseif found[at + 1] then
        at = at + 1
        seq = found[at]
      elseif next_seq <= last and looks < PAGE.candidates then
        look()
      else
        break
      end
      if seq and not known[seq] then -- a group may be in behind, and not below the floor
        known[seq], seqs[#seqs + 1] = true, seq
        before[#seqs], behind[#seqs] = from, member or false
      end
    end
    unseen = #seqs == 0 and (most <= 0 or next_seq <= last)
    if #seqs == 0 then
      note_floor()
    end
    return seqs
  end

  local function pass(used, stuck)
    local passed = {}
    for i = 1, used do -- bound: PAGE.candidates_leased, and groups that go
      passed[#passed + 1] = behind[i] or nil
    end
    in_parts('ZREM', key('behind'), passed)
    at = used < #before and before[used + 1] or at
    looks, leased = looks + used, leased + stuck
    note_floor()
  end

  return {next = next_ones, pass = pass}
end

-- Candidates from a sorted set, the first ones. After a page of candidates that another consumer group
-- leases, those by arrival follow.
local function sorted_candidates(name)
  local rank = 0

  local function next_ones(most)
    most = math.min(most, PAGE.candidates_leased - rank)
    local members = most > 0 and redis.call('ZRANGE', name, rank, rank + most - 1) or {}
    for i, member in ipairs(members) do
      members[i] = tonumber(member)
    end
    return members
  end

  local function pass(_, stuck)
    rank = rank + stuck
  end

  return {next = next_ones, pass = pass}
end
