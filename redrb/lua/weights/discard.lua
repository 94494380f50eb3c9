-- Refuse an attempt that failed, or of which a rank failed, unless its version was committed after all.
-- KEYS[1] versions
-- ARGV    token, version, of_rank
--         of_rank: '1': of a rank other than 0; rank 0 may prepare the attempt later, and is refused then
-- Returns {'ok', whether the trash has keys}: the caller deletes these, and all of its own | {'committed'}
--@include weights permissions

local committed = at(tonumber(ARGV[2]))
local function has_its_keys(ranges)
  return string.find(';' .. (ranges or ''), ';' .. ARGV[1] .. ' ', 1, true)
end
if committed and (committed.token == ARGV[1] or has_its_keys(committed.full)
    or has_its_keys(committed.pieces)) then
  return {'committed'}
end
check_permissions(pins)
check_keys()
begin_writing()
local noted = redis.call('HGETALL', attempts) -- bound: ranks
for i = 1, #noted, 2 do -- bound: ranks
  if noted[i] == ARGV[1] or string.find(noted[i + 1], ' ' .. ARGV[1] .. ' ', 1, true) then
    discard_attempt(noted[i + 1])
    redis.call('HDEL', attempts, noted[i])
  end
end
if ARGV[3] == '1' then
  redis.call('HSET', attempts, ARGV[1], 'dropped')
  redis.call('EXPIRE', attempts, 3600)
end
return {'ok', redis.call('EXISTS', trash)}
