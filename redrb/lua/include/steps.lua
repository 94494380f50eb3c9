-- Steps that have parts: a step ends when all ranks have acknowledged it, and is formed anew when a part
-- failed too often.
--@include task pending leases takeover ranks finishing

-- Forget the parts of a step. `leave` is called with the slot and the rank of each.
local function forget_parts(group, step, world, leave)
  local number_of = string.format('%.0f', step)
  redis.call('HDEL', key('rank_parts', group), number_of, number_of .. ':ending')
  for rank = 0, world - 1 do -- bound: ranks, 4,096 at most (MOST_RANKS)
    local name = part_of(step, rank)
    redis.call('HDEL', key('rank_parts', group), name, name .. ':given', name .. ':acked', name .. ':weights')
    leave(slot_of(step, rank), rank)
  end
end

-- Take the parts of a step and of all later steps apart, as deliveries to a rank failed too often.
-- Their groups are requeued: some now, the others by heartbeats.
local function unform(group, step, failed, failure)
  local ranks = key('ranks', group)
  local state = numbers(ranks, 'world', 'formed')
  for each = step, state[2] do -- bound: unacknowledged steps, 64 at most (MOST_STEPS)
    forget_parts(group, each, state[1], function(slot, rank)
      if redis.call('HEXISTS', key('leases', group), slot) == 1 then
        lose(group, slot, each == step and rank == failed and failure)
      end
    end)
  end
  return_rest(group, PAGE.taken_over)
  redis.call('HSET', ranks, 'formed', string.format('%.0f', step - 1))
  redis.call('HINCRBY', ranks, 'attempt', 1)
  wake_ranks(group)
end

-- Whether a living rank has its part of a step, so that it will not ask for it.
local function is_given(group, step, living)
  for _, rank in ipairs(living) do
    local name = part_of(step, rank)
    local found = redis.call('HMGET', key('rank_parts', group), name .. ':given', name .. ':acked')
    if found[1] or found[2] then
      return true
    end
  end
  return false
end

-- Count a failed delivery of a part. If any of its groups failed too often, such groups become dead
-- letters and the step is taken apart. Returns whether it was.
local function fail_part(group, step, rank, failure)
  local seqs = words(redis.call('HGET', key('rank_parts', group), part_of(step, rank)) or '')
  local held, members, counted, most = held_by(group, slot_of(step, rank), seqs), {}, {}, max_deliveries()
  for i, seq in ipairs(held) do
    members[i] = member_of(seq)
  end
  for i, failed in ipairs(replies_of('HMGET', key('deliveries', group), members)) do
    local deliveries = checked(failed or '0', key('deliveries', group)) + 1
    if deliveries >= most then
      unform(group, step, rank, failure)
      return true
    end
    counted[2 * i - 1], counted[2 * i] = members[i], string.format('%.0f', deliveries)
  end
  in_parts('HSET', key('deliveries', group), counted)
  return false
end

-- End a page of the groups of a step that all ranks have acknowledged; `all` holds the samples of each rank.
-- Returns whether there are more.
local function end_step(group, step, all)
  local parts, left = key('rank_parts', group), PAGE.ended
  redis.call('HSET', parts, string.format('%.0f', step) .. ':ending', '1')
  for each = 0, #all do
    local name, seqs = part_of(step, each), {}
    local text, ends = redis.call('HGET', parts, name), 1
    for seq, behind in string.gmatch(text, '(%S+)%s*()') do -- bound: left
      if #seqs == left then
        break
      end
      seqs[#seqs + 1], ends = seq, behind
    end
    local rest = string.sub(text, ends)
    end_held(group, slot_of(step, each), seqs, 'ack', rest == '' and all[each] or 0)
    redis.call('HSET', parts, name, rest)
    left = left - #seqs
    if rest ~= '' then
      return true
    end
  end
  return false
end

-- Note that a rank has trained its part; the last rank acknowledges the step. Returns whether there are more
-- groups to acknowledge.
local function mark_acked(group, step, rank, samples)
  local parts, ranks, all = key('rank_parts', group), key('ranks', group), {}
  local name, state = part_of(step, rank), numbers(ranks, 'first', 'formed', 'world')
  if redis.call('HEXISTS', parts, name) == 0 then
    return false
  end
  redis.call('HDEL', parts, name .. ':given')
  redis.call('HSETNX', parts, name .. ':acked', samples)
  for each = 0, state[3] - 1 do -- bound: ranks
    all[each] = tonumber(redis.call('HGET', parts, part_of(step, each) .. ':acked') or '')
    if not all[each] then
      return false
    end
  end
  if end_step(group, step, all) then
    return true
  end
  forget_parts(group, step, state[3], function(slot)
    empty_slot(group, slot)
  end)
  -- bound: unacknowledged steps, 64 at most (MOST_STEPS)
  while state[1] <= state[2] and redis.call('HEXISTS', parts, string.format('%.0f', state[1])) == 0 do
    state[1] = state[1] + 1
  end
  redis.call('HSET', ranks, 'first', string.format('%.0f', state[1]))
  return false
end

-- Whether a step is being ended, as all ranks have acknowledged it.
local function is_ending(group, step)
  return redis.call('HEXISTS', key('rank_parts', group), string.format('%.0f', step) .. ':ending') == 1
end
