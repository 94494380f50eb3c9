-- A rank asks for its next batch, and may decide it: rank 0 by the parts of all ranks or an error, another
-- rank by an error, as its time is up. The first decision stands for all ranks, and wakes them.
-- KEYS[1] stream
-- ARGV    the call `AskStep` of redrb/stream/ranks/calls.py
-- Returns its reply. Repeated, it decides nothing more.
--
-- The hash ranks:<group> holds the consumer of each rank by its number, and in `former` that of the last
-- rank 0. The hash rank_steps:<group> holds
--   <number>           a decision, until all ranks have read the one after it
--   unread:<number>    how many ranks have not read it
--   next, base         the number of the next decision, and what it was when a rank started last
--   got:<rank>         the number of the decision that a rank asks for
--   met                how many ranks there were when all had asked since that start
--   due                "<number> <time>": when the first rank that waits gives up
--@include task clock permissions ranks

local KEPT_MS = 86400000 -- since the last call
check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local rank, world, place, consumer = ask.rank, ask.world_size, ask.number, ask.consumer
local ranks, steps = key('ranks', ask.group), key('rank_steps', ask.group)
local first, holder, former = unpack(redis.call('HMGET', ranks, '0', rank, 'former'))
local met, at_due, following, base, got = unpack(redis.call('HMGET', steps, 'met', 'due', 'next', 'base',
  'got:' .. rank))
local lead = first or former
local starts, missing = holder ~= consumer or rank == 0 and met and tonumber(met) ~= world, {}
if starts and holder and holder ~= consumer and ask.joined then
  return cmsgpack.pack({replaced = true})
end

if ask.joined and got and place > tonumber(got) then -- it has read the one before
  local unread = redis.call('HINCRBY', steps, 'unread:' .. place - 1, -1)
  if unread <= 0 then
    redis.call('HDEL', steps, place - 2, 'unread:' .. place - 1)
  end
  if unread <= 1 and rank > 0 and lead then -- rank 0 may wait for that
    wake_rank(lead .. '.read')
  end
end
if starts then
  if rank == 0 or met then -- decisions so far are for others
    wake_ranks(ask.group)
    former, met, at_due, base = lead, nil, nil, (rank > 0 or lead == consumer) and following or 0
    redis.call('UNLINK', ranks)
    redis.call('HDEL', steps, 'met', 'due')
    if base == 0 then -- nor does anybody end them
      redis.call('UNLINK', steps)
    end
    redis.call('HSET', steps, 'base', base)
    redis.call('HSET', ranks, 'former', lead or consumer)
  elseif lead then
    wake_rank(lead .. '.rank')
  end
  place = tonumber(base or 0)
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
redis.call('HSET', steps, 'got:' .. rank, place)
if ask.decision and not starts and not decided then
  decided = ask.decision
  redis.call('HSET', steps, place, decided, 'next', place + 1, 'unread:' .. place, world)
  wake_ranks(ask.group)
end
local at, due = string.match(at_due or '', '^(%d+) (%d+)$')
local left_ms = tonumber(at) == place and math.max(0, due - now_ms()) or nil
if ask.left_ms and not decided and (left_ms or math.huge) > ask.left_ms then
  redis.call('HSET', steps, 'due', string.format('%.0f %.0f', place, now_ms() + ask.left_ms))
  if lead and not left_ms then -- rank 0 may be taking already
    wake_rank(lead .. '.rank')
  end
end
redis.call('PEXPIRE', ranks, KEPT_MS)
redis.call('PEXPIRE', steps, KEPT_MS)
return cmsgpack.pack({number = place, decision = decided or nil, missing = missing, left_ms = left_ms,
  former = rank == 0 and former ~= consumer and former or nil})
