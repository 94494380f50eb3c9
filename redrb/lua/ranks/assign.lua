-- Deal a batch that was leased for a step: every rank gets its part, once.
-- KEYS[1] stream
-- ARGV    group, step, attempt, spec, then of each rank: weights, entries, seq ...
--         attempt: the one in which the batch was leased; its number is the token of that lease
--         spec: the request of all ranks
--         weights: of an order that draws, as the rank will read them; else ''
-- Returns {'ok'} | {'again'}: the attempt is over, or another batch is leased by now
--@include task pending ranks

begin_writing()
local group, step, attempt = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local ranks, parts, slot = key('ranks', group), key('rank_parts', group), slot_of(step)
if not exists() then
  return {'again'}
end
local state = numbers(ranks, 'attempt', 'formed', 'world')
check_ranks(group)
if state[2] + 1 ~= step or state[1] ~= tonumber(attempt) then
  -- a batch that comes too late is requeued
  if state[2] + 1 ~= step or redis.call('HGET', key('leases', group), slot) == attempt then
    empty_slot(group, slot)
  end
  return {'again'}
end

local held = {}
each_leased(group, slot, function(seq)
  held[string.format('%.0f', seq)] = true
end)
local dealt, at = {}, 5
for rank = 0, state[3] - 1 do -- bound: ranks
  local last = at + 1 + tonumber(ARGV[at + 1])
  dealt[rank] = {weights = ARGV[at]}
  for i = at + 2, last do -- bound: ARGV
    if not held[ARGV[i]] then
      return {'again'}
    end
    table.insert(dealt[rank], ARGV[i])
  end
  at = last + 1
end

for rank = 0, state[3] - 1 do -- bound: ranks
  if redis.call('HEXISTS', key('returning', group), slot_of(step, rank)) == 1 then -- of an earlier attempt
    return {'again'}
  end
end

-- Hand entries of the batch to a rank. Returns the seqs of the entries that still exist, as text.
local function hand(rank, seqs)
  local target, found = slot_of(step, rank), {}
  redis.call('HSET', key('leases', group), target, attempt)
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
  redis.call('HSET', parts, part_of(step, rank), hand(rank, dealt[rank]))
  if dealt[rank].weights ~= '' then
    redis.call('HSET', parts, part_of(step, rank) .. ':weights', dealt[rank].weights)
  end
end
redis.call('HSET', parts, ARGV[2], ARGV[4])
redis.call('HSET', ranks, 'formed', ARGV[2], 'attempt', string.format('%.0f', state[1] + 1))
redis.call('HDEL', ranks, 'forming')
empty_slot(group, slot) -- requeue entries that were not dealt
wake_ranks(group)
return {'ok'}
