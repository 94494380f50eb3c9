-- A rank asks for its next batch, and may decide it: rank 0 by the parts of all ranks or an error, another
-- rank by an error, as its time is up. The first decision stands for all ranks, and wakes them.
-- KEYS[1] stream
-- ARGV    the call `AskStep` of redrb/stream/ranks/calls.py
-- Returns its reply. Repeated, it decides nothing more.
--
-- The hash ranks:<group> holds the consumer of each rank by its number, and in `former` that of the last
-- rank 0. The hash rank_steps:<group> holds decisions by number, counted from the last start of a rank; in
-- `met` how many ranks were there at the first one; in `due`, "<number> <time>", when the first rank that
-- waits gives up; in got:<rank> how many decisions it has read; and `awaited` while rank 0 waits for that.
--@include task clock waiters permissions ranks
--@before ranks/read

local KEPT_MS = 86400000 -- since the last call
check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local rank, world, place, consumer = ask.rank, ask.world_size, ask.number, ask.consumer
local ranks, steps = key('ranks', ask.group), key('rank_steps', ask.group)
local first, holder, former = unpack(redis.call('HMGET', ranks, '0', rank, 'former'))
local met, at_due, awaited = unpack(redis.call('HMGET', steps, 'met', 'due', 'awaited'))
local starts, missing = holder ~= consumer or rank == 0 and met and tonumber(met) ~= world, {}
if starts and holder and holder ~= consumer and ask.joined then
  return cmsgpack.pack({replaced = true})
end

if starts then
  place = 0
  if rank == 0 or met then -- decisions so far are for others
    former, met, at_due = first or former, nil, nil
    wake_ranks(ask.group)
    redis.call('UNLINK', ranks, steps)
    redis.call('HSET', ranks, 'former', former or consumer)
  elseif first then
    send_wake(first .. '.rank')
  end
  redis.call('HSET', ranks, rank, consumer)
end
local decided = redis.call('HGET', steps, place)
if tonumber(met) ~= world then
  local all = {}
  for other = 0, world - 1 do -- bound: ranks
    all[other + 1] = other
  end
  for other, there in ipairs(replies_of('HMGET', ranks, all)) do
    missing[#missing + 1] = not there and other - 1 or nil
  end
  if rank == 0 and #missing == 0 then
    redis.call('HSET', steps, 'met', world)
  end
end
if rank > 0 then
  redis.call('HSET', steps, 'got:' .. rank, place)
  if awaited and first then
    send_wake(first .. '.read')
  end
end
if ask.decision and not starts and not decided then
  decided = ask.decision
  redis.call('HSET', steps, place, decided)
  redis.call('HDEL', steps, place - ask.kept)
  wake_ranks(ask.group)
end
local at, due = string.match(at_due or '', '^(%d+) (%d+)$')
local left_ms = tonumber(at) == place and math.max(0, due - now_ms()) or nil
if ask.left_ms and not decided and (left_ms or math.huge) > ask.left_ms then
  redis.call('HSET', steps, 'due', string.format('%.0f %.0f', place, now_ms() + ask.left_ms))
end
redis.call('PEXPIRE', ranks, KEPT_MS)
redis.call('PEXPIRE', steps, KEPT_MS)
return cmsgpack.pack({starts = starts, decision = decided or nil, missing = missing, left_ms = left_ms,
  former = place == 0 and former ~= consumer and former or nil})
