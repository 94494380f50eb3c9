-- A rank ends its part of a step, or some of it. A step is acknowledged when all ranks have: until
-- then a crew that starts again finds every part.
-- KEYS[1] stream
-- ARGV    group, consumer, rank, step, outcome, reason, samples, seq ...
--         outcome: ack (all of the part) | release (kept for this rank) | fail (kept, counts as a
--         failed delivery) | reject (at once, to the dead-letter stream) | expire (at once) | leave (the
--         rank goes; its parts are kept)
-- Returns {'ok'} | {'lost'}; the same call again changes nothing and returns {'ok'}.
--@include task index room waiters groups ranks endings steps

begin_writing()
local group, consumer, rank, step = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local outcome, crew, parts, now = ARGV[5], key('crew', ARGV[1]), key('parts', ARGV[1]), now_ms()
if redis.call('HGET', crew, 'holder:' .. ARGV[3]) ~= consumer then
  return {'lost'}
end
local state = numbers(crew, 'first', 'formed')
if outcome == 'leave' then
  for each = state[1], state[2] do
    redis.call('HDEL', parts, part_of(each, rank) .. ':given')
  end
  return {'ok'}
end
local name, slot = part_of(step, rank), slot_of(step, rank)
if step > state[2] then
  return {'lost'}
elseif step < state[1] or redis.call('HEXISTS', parts, ARGV[4]) == 0 then
  return {'ok'} -- all have acknowledged it
end

local own, mine, left = {}, {}, {}
for _, seq in ipairs(words(redis.call('HGET', parts, name))) do
  own[seq] = true
end
for i = 8, #ARGV do
  if own[ARGV[i]] then
    mine[#mine + 1] = ARGV[i]
  elseif outcome ~= 'reject' and outcome ~= 'expire' then
    return {'lost'} -- the step was formed anew
  end
end
if outcome == 'release' then
  redis.call('HDEL', parts, name .. ':given')
elseif outcome == 'fail' then
  if redis.call('HDEL', parts, name .. ':given') == 1 then
    fail_part(group, step, rank, consumer)
  end
elseif outcome == 'ack' then
  mark_acked(group, step, rank, ARGV[7])
else
  if outcome == 'reject' then
    reject_held(group, slot, mine, ARGV[6], consumer)
  else
    end_held(group, slot, mine, outcome, 0)
  end
  for _, seq in ipairs(mine) do
    own[seq] = nil
  end
  for _, seq in ipairs(words(redis.call('HGET', parts, name))) do
    if own[seq] then
      left[#left + 1] = seq
    end
  end
  redis.call('HSET', parts, name, table.concat(left, ' '))
  if #left == 0 then -- nothing is left to be acknowledged
    mark_acked(group, step, rank, '0')
  end
end
wake('#room', room_left(), now)
wake_pools(group, now)
return {'ok'}
