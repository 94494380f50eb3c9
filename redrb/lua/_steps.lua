-- Steps of ranks end when all ranks have acknowledged their parts.

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
