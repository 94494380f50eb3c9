-- Random orders, after a draw: the weights of the drawn groups, and where the next draw begins.
--@include task

-- Note groups that are being drawn: their weights for the reply, and the last of their places as the clock,
-- if only they lie up to there.
local function note_drawn(group, pool, found, all, weights)
  for _, facts in ipairs(all) do
    weights[#weights + 1] = facts and string.format('%.17g', facts.score) or '0'
  end
  local clock = 0
  for _, at in ipairs(replies_of('ZMSCORE', key('ready', pool), found)) do
    clock = math.max(clock, tonumber(at or '0'))
  end
  local near = redis.call('ZCOUNT', key('ready', pool), '-inf', string.format('%.17g', clock))
  if clock < math.huge and near == #found then
    redis.call('HSET', key('clock', group), pool, string.format('%.17g', clock))
  end
end
