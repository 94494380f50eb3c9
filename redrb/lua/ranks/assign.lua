-- Deal a batch that was leased for a step: every rank gets its part, once.
-- KEYS[1] stream
-- ARGV    the call `AssignParts` of redrb/stream/ranks/calls.py
-- Returns its reply
--@include task pending ranks

begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, step, token = ask.group, ask.step, string.format('%.0f', ask.attempt)
local ranks, parts, slot = key('ranks', group), key('rank_parts', group), slot_of(step)
if not exists() then
  return cmsgpack.pack('again')
end
local state = numbers(ranks, 'attempt', 'formed', 'world')
check_ranks(group)
if state[2] + 1 ~= step or state[1] ~= ask.attempt then
  -- a batch that comes too late is requeued
  if state[2] + 1 ~= step or redis.call('HGET', key('leases', group), slot) == token then
    empty_slot(group, slot)
  end
  return cmsgpack.pack('again')
end

local held = {}
each_leased(group, slot, function(seq)
  held[string.format('%.0f', seq)] = true
end)
for _, part in ipairs(ask.parts) do
  for _, seq in ipairs(part.ids) do
    if not held[seq] then
      return cmsgpack.pack('again')
    end
  end
end

for rank = 0, state[3] - 1 do -- bound: ranks
  if redis.call('HEXISTS', key('returning', group), slot_of(step, rank)) == 1 then -- of an earlier attempt
    return cmsgpack.pack('again')
  end
end

-- Hand entries of the batch to a rank. Returns the seqs of the entries that still exist, as text.
local function hand(rank, seqs)
  local target, found = slot_of(step, rank), {}
  redis.call('HSET', key('leases', group), target, token)
  redis.call('ZADD', key('slots', group), 0, target)
  for first = 1, #seqs, PAGE.arguments do
    local ids, claimed = {}, {}
    for i = first, math.min(first + PAGE.arguments - 1, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
    end
    ids[#ids + 1] = 'JUSTID'
    for _, id in ipairs(redis.call('XCLAIM', stream, group, target, 0, unpack(ids))) do
      claimed[id] = true
    end
    for i = 1, #ids - 1 do
      local seq = seqs[first + i - 1]
      if claimed[ids[i]] then
        found[#found + 1] = seq
      else -- deleted from the stream by another client
        redis.call('XACK', stream, group, ids[i])
        redis.call('HDEL', key('facts'), member_of(seq))
        add(key('group', group), 'evicted', 1)
      end
    end
  end
  return table.concat(found, ' ')
end

for rank = 0, state[3] - 1 do -- bound: ranks
  local part = ask.parts[rank + 1]
  redis.call('HSET', parts, part_of(step, rank), hand(rank, part.ids))
  if part.weights then
    redis.call('HSET', parts, part_of(step, rank) .. ':weights', cmsgpack.pack(part.weights))
  end
end
local step_name = string.format('%.0f', step)
redis.call('HSET', parts, step_name, ask.spec)
redis.call('HSET', ranks, 'formed', step_name, 'attempt', string.format('%.0f', state[1] + 1))
redis.call('HDEL', ranks, 'forming')
empty_slot(group, slot) -- requeue entries that were not dealt
wake_ranks(group)
return cmsgpack.pack('ok')
