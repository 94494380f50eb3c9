-- A rank ends its part of a step, or groups of it. The step is acknowledged when all ranks have
-- acknowledged it: until then, ranks that start again find every part.
-- KEYS[1] stream
-- ARGV    group, consumer, rank, step, outcome, reason, exception, samples, seq ...
--         outcome: ack (the whole part) | release (kept for this rank) | fail (kept, counts as a failed
--         delivery) | reject (to the dead-letter stream, at once) | expire (at once)
--         | leave (the process of the rank ends; its parts are kept)
--         reason, exception: of reject and fail, for dead letters: why, or an exception's message and class
--         samples: of ack, number of samples trained
-- Returns {'ok'} | {'lost', reason} | {'more'}: run it again without seqs, more groups of the step are left
--         reason: replaced (another process is this rank) | anew (the step was formed again)
--         | ended (the ranks have ended, or have ended this step, while this one was silent)
--         A rank that was silent for too long still ends its parts, while no other process is this rank.
--         Repeated, it changes nothing more and returns {'ok'}.
--@include task waking ranks endings steps rejections

begin_writing()
local group, consumer, rank, step = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local outcome, ranks, parts = ARGV[5], key('ranks', group), key('rank_parts', group)
local why = {text = ARGV[6], exception = ARGV[7], consumer = consumer}
local holder = redis.call('HGET', ranks, 'holder:' .. ARGV[3])
if holder and holder ~= consumer then
  return {'lost', 'replaced'}
end
local state = numbers(ranks, 'first', 'formed')
check_ranks(group)
if outcome == 'leave' then
  for each = state[1], state[2] do -- bound: unacknowledged steps, 64 at most (MOST_STEPS)
    redis.call('HDEL', parts, part_of(each, rank) .. ':given')
  end
  return {'ok'}
end
local name, slot = part_of(step, rank), slot_of(step, rank)
if step > state[2] then
  return {'lost', holder and 'anew' or 'ended'}
elseif step < state[1] or redis.call('HEXISTS', parts, ARGV[4]) == 0 then
  return holder and {'ok'} or {'lost', 'ended'} -- all have acknowledged it
end
local given = redis.call('HGET', parts, name .. ':given')
if not holder and given and given ~= consumer then -- a process that replaced this one, and died
  return {'lost', 'replaced'}
end

local held, mine, left, more = {}, {}, {}, false
if #ARGV > 8 or outcome == 'reject' or outcome == 'expire' then
  for _, seq in ipairs(words(redis.call('HGET', parts, name))) do
    held[seq] = true
  end
end
for i = 9, #ARGV do
  if held[ARGV[i]] or is_ending(group, step) then
    mine[#mine + 1] = ARGV[i]
  elseif outcome ~= 'reject' and outcome ~= 'expire' then
    return {'lost', 'anew'}
  end
end
if outcome == 'release' then
  redis.call('HDEL', parts, name .. ':given')
elseif outcome == 'fail' then
  if redis.call('HDEL', parts, name .. ':given') == 1 then
    fail_part(group, step, rank, why)
  end
elseif outcome == 'ack' then
  more = mark_acked(group, step, rank, ARGV[8])
else
  if outcome == 'reject' then
    reject_held(group, slot, mine, why)
  else
    end_held(group, slot, mine, outcome, 0)
  end
  for _, seq in ipairs(mine) do
    held[seq] = nil
  end
  for _, seq in ipairs(words(redis.call('HGET', parts, name))) do
    if held[seq] then
      left[#left + 1] = seq
    end
  end
  redis.call('HSET', parts, name, table.concat(left, ' '))
  if #left == 0 then -- nothing is left to be acknowledged
    more = mark_acked(group, step, rank, '0')
  end
end
if not more and is_ending(group, state[1]) and state[1] ~= step then -- its last rank has died meanwhile
  more = mark_acked(group, state[1], rank, '0')
end
wake_room()
wake_returned(group)
return {more and 'more' or 'ok'}
