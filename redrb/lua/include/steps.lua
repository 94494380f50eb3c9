-- Steps that have parts: acknowledged by all ranks they end, failed too often they are formed anew.
--@include task index groups leases ranks endings

local function forget_parts(group, step, world)
  redis.call('HDEL', key('parts', group), string.format('%.0f', step))
  for rank = 0, world - 1 do
    local name = part_of(step, rank)
    redis.call('HDEL', key('parts', group), name, name .. ':given', name .. ':acked', name .. ':weights')
    empty_slot(group, slot_of(step, rank))
  end
end

-- The steps from this one on have parts no more: their groups wait again, unharmed.
local function unform(group, step)
  local crew = key('crew', group)
  local state = numbers(crew, 'world', 'formed')
  for each = step, state[2] do
    forget_parts(group, each, state[1])
  end
  redis.call('HSET', crew, 'formed', string.format('%.0f', step - 1))
  redis.call('HINCRBY', crew, 'attempt', 1)
  wake_ranks(group)
end

-- Whether a rank that lives has a part of a step, so that it will not ask for it.
local function is_given(group, step, living)
  for _, rank in ipairs(living) do
    local name = part_of(step, rank)
    local found = redis.call('HMGET', key('parts', group), name .. ':given', name .. ':acked')
    if found[1] or found[2] then
      return true
    end
  end
  return false
end

-- A delivery of a part has failed. When that was too often for any of its groups, those are buried
-- and the step is to be formed anew. Returns whether it is.
local function fail_part(group, step, rank, consumer)
  local seqs, most, worn = words(redis.call('HGET', key('parts', group), part_of(step, rank)) or ''),
    max_deliveries(), false
  for _, seq in ipairs(seqs) do
    worn = worn or number(key('deliveries', group), member_of(seq)) + 1 >= most
  end
  for _, seq in ipairs(seqs) do
    if worn then
      return_lease(group, seq, true, consumer)
    elseif is_leased(group, seq) then
      redis.call('HINCRBY', key('deliveries', group), member_of(seq), 1)
    end
  end
  if worn then
    unform(group, step)
  end
  return worn
end

-- A rank has trained its part. When all have, the step is done.
local function mark_acked(group, step, rank, samples)
  local parts, crew, all = key('parts', group), key('crew', group), {}
  local name, state = part_of(step, rank), numbers(crew, 'first', 'formed', 'world')
  if redis.call('HEXISTS', parts, name) == 0 then
    return
  end
  redis.call('HDEL', parts, name .. ':given')
  redis.call('HSETNX', parts, name .. ':acked', samples)
  for each = 0, state[3] - 1 do
    all[each] = tonumber(redis.call('HGET', parts, part_of(step, each) .. ':acked') or '')
    if not all[each] then
      return
    end
  end
  for each = 0, state[3] - 1 do
    local seqs = words(redis.call('HGET', parts, part_of(step, each)))
    end_held(group, slot_of(step, each), seqs, 'ack', all[each])
  end
  forget_parts(group, step, state[3])
  while state[1] <= state[2] and redis.call('HEXISTS', parts, string.format('%.0f', state[1])) == 0 do
    state[1] = state[1] + 1
  end
  redis.call('HSET', crew, 'first', string.format('%.0f', state[1]))
end
