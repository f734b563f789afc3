"""The rules of the text signals as tables: look-alikes and patterns, by signal and language.

``processors.reward.signals`` says how they are read. Rules are written for normalised text:
lower case, ASCII punctuation, simplified characters, no space beside Chinese.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Signal(StrEnum):
    """What a user's turn can say about the reply before it."""

    REPETITION = "repetition"
    CORRECTION = "correction"
    CONFIRMATION = "confirmation"
    DIRECTIVE = "directive"
    DETAILS = "details"
    TOOL_ERROR = "tool_error"


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of one signal in one language, read on normalised text.

    Args:
        signal: What a match means.
        language: ``en`` or ``zh``; both are tried on every turn.
        masks: Look-alikes, blanked out before the patterns are tried.
        patterns: Any match is the signal.
    """

    signal: Signal
    language: str
    masks: tuple[str, ...]
    patterns: tuple[str, ...]


_IS = r"(?:'?s| is| was|'?re| are| were)"
_IT = r"\b(?:that|this|it)"
_CLAUSE = r"(?:^|[.,;:!?] ?|\bplease |\bpls |\bjust )"
_START = r"(?:^|[.,;:!] ?)"
QUOTED = r"[\"“「『][^\"”」』]{1,120}[\"”」』]"
_QUESTION_EN = (
    r"(?:^|[.!;?,] ?)(?:(?:and|but|so|ok|also) )?(?:what|how|why|when|where|who|which|whose"
    r"|(?:is|are|was|were|do|does|did|has|have|can|could|should|will|would)"
    r" (?:i|we|he|she|they|it|this|that|there|these|the|a|an|my|your|people)\b)[^.!;?]*\?"
)
_QUESTION_ZH = (
    r"[^,。!?;]*(?:什么|怎么|怎样|如何|哪|为何|谁|吗|呢|多少|是否|能不能|可不可以|是不是"
    r"|对不对|好不好"
    r"|有没有|要不要|行不行|几[个点时次年])[^,。!?;]*\??"
)
_OWN_EN = (
    r"\b(?:my|our|his|her|their) \w+(?: \w+)? (?:is|are|was|were|does|do|did|has|have|had"
    r"|keeps?|won'?t|can'?t|says?|said|doesn'?t|didn'?t|isn'?t)\b[^.!?;]*"
)
_OWN_ZH = r"我(?:们|家)?的?(?:代码|程序|电脑|手机|老板|朋友|同事|老师|孩子|文件|网站|作业)[^。!?;]*"
_DOUBT_EN = r"\b(?:if|whether|unless|in case|why|when|how|until|once)"

_MADE_EN = (
    r"(?:recipe|list|answer|plan|table|code|text|version|summary|translation|email|letter|draft"
    r"|example|reply|schedule|report|query|script|function|document|itinerary|invoice|message)"
)
_GONE_EN = (
    r"(?:removed|replaced|renamed|repealed|discontinued|deprecated|closed|cancell?ed|retired"
    r"|dropped"
    r"|shut down|superseded|abolished|demolished|moved)"
)
_FAILS_EN = (
    r"(?:\w*error|\w*exception|traceback|fails?|failed|crash(?:es|ed)?|nothing|denied|undefined"
    r"|not found|hangs?|freezes?)"
)

_NOT_ASKED_ZH = r"(?!.*(?:吗|呢|哪|怎么|什么|如何|多少|\?|好还是))"
"""No question follows in the turn."""

CORRECTION_EN = RuleSet(
    Signal.CORRECTION,
    "en",
    masks=(
        r"\bnot (?:the same as|a (?:problem|big deal|secret|must|bad (?:idea|thing)"
        r"|real|good for)|an issue|a question)\b",
        _QUESTION_EN,
        _OWN_EN,
        r"\bno (?:further|more|other|one)\b",
        r"^no[,.! ]+(?:it|that|this)" + _IS + r" (?:not necessary|up to you|just)\b",
        r"\bno (?:problem|worries|need|thanks|thank you|rush|doubt|issues?|idea|matter|offence)\b",
        _IT + _IS + r" (?:fine|ok|okay|good|all|enough|great|perfect|everything|alright)\b",
        _DOUBT_EN
        + r"(?! i (?:run|try|execute|compile|open|paste|start|call|import|use|follow|click"
        r"|press)\b)"
        r"(?: \w+){0,3} (?:that|this|it|you|answer|code)\b[^,.!?;]*",
        r"(?:\bnot|n'?t|\bnothing|\bnever)(?:'?s| is| was)?(?: \w+)? wrong\b",
        r"\bwrong (?:to|with|that)\b",
        r"\b(?:what|something|anything|everything|who)(?:'?s| is| was| went| goes)? wrong\b",
        r"\b(?:true|right|correct) or (?:false|wrong|incorrect)\b",
        r"\bfalse (?:positives?|alarm|friends?|negatives?)\b",
        r"\bi (?:didn'?t|did not|never) (?:mean|want) to\b",
        r"(?:did|does)(?:n'?t| not) work (?:before|until|at first|earlier|yesterday)\b",
        r"\bnot (?:only|what you know)\b",
        r"\b(?:he|she|they|who|people|some|many) (?:said?|says|think|thinks|claims?)\b[^,.!?;]*",
    ),
    patterns=(
        r"^(?:no,? |but |well,? )?i (?:said|told you|specifically|clearly"
        r"|explicitly)\b[^?]*$|\bi (?:told you|already said)\b",
        r"\b(?:is|are|was|were)(?:n'?t| not) even\b|\bnot (?:even )?close\b|\bnobody asked\b",
        r"^(?:are you (?:kidding|serious|joking)|come on|seriously|(?:no[,. ]+){2,})\b",
        r"\b(?:app|page|program|script|browser|screen|it|everything|site|build|server"
        r"|function|query|test)\b(?: \w+)?"
        r" (?:freezes?|crash(?:es|ed)|hangs?|breaks?|broke|fails?|failed|stopped working)\b"
        r"(?=[.,!]|$| when| now| at| again| with| earlier| because| on)[^?]*$",
        r"\b(?:that|this|it|those|these|they)(?:'?s|'?re| is| are| was| were)(?: not"
        r"|n'?t) (?:the|a|an|what|how|who|where)\b[^?]*$",
        r"\b(?:that'?s|this is|it'?s|you (?:gave|listed|wrote|did|have)|there are"
        r"|here are)(?: \w+)? (?:only|just) (?:half|part|one|two|three|some|a few"
        r"|the first)\b",
        r"\b(?:you|your \w+|it|that|this|the \w+) (?:\w+ )?(?:leaves?|left) (?:out"
        r"|something)\b|\b(?:your|the) \w+ (?:omits?|lacks?|misses)\b",
        r"\b(?:breaks|broke|breaking) (?:the|my|everything|our)\b|\bno difference\b"
        r"|\bsame (?:result|error|problem|output|mistake|issue)\b",
        r"\b(?:i (?:get|got)|gives?|gave|returns?|shows?|prints?|says?)\b[^.!?;]*\binstead of\b",
        r"\bi(?:'?ve| have)? already tried\b|\byou (?:answered|wrote|replied"
        r"|translated|changed|deleted|removed|cited|gave me|used|put"
        r"|listed)\b[^.!?;]*(?:,? (?:but|not|instead|when)|, i)\b",
        r"^(?:no|nope|nah)\b[,.!]+ ?(?:the|he|she|they|there|you|your|in|on|its?|a|an|i)\b",
        r"^(?:no|nope|nah)\b[^?]*\b(?:not|wrong|still|instead)\b",
        r"\bstill (?:\w+ )?(?:crash\w*|fail\w*|broken|the same|too \w+|not|doesn'?t"
        r"|missing|empty|there)\b",
        r"\bi (?:asked|was asking|wanted|needed|meant)(?: for"
        r"| about)? [^.!?;]{1,60}[,;] ?(?:you|but|this|that|not)\b",
        r"\byou(?:'?ve| have)? (?:\w+ )?(?:skipped|omitted|confused|swapped|left out"
        r"|overlooked|invented|made up"
        r"|mixed up|missed|mistook)\b",
        r"\byou(?:'?ve| have)? (?:got|mixed|put|have) (?:\w+ ){1,3}(?:mixed up|up"
        r"|wrong|backwards|reversed|swapped)\b",
        r"\byou (?:keep|kept) (?:making|giving|repeating|ignoring|getting|saying"
        r"|forgetting|using)\b",
        r"\byou(?:'?re| are) (?:contradicting|repeating yourself|making (?:this|that"
        r"|it) up|hallucinating|confusing"
        r"|missing|ignoring)\b",
        r"\byou (?:did not|didn'?t|do not|don'?t) (?:\w+ )?(?:read|understand|follow"
        r"|listen|get (?:it|me|what)|do what"
        r"|include|mention|use what)\b",
        r"\b(?:the|that|this|your|second|first|third|last) (?:link|url|page|command"
        r"|function|method|option|package|module|flag|field"
        r"|address|website|book|paper)\b(?: \w+){0,4} (?:(?:is|are|was|were|has been"
        r"|seems) (?:\w+ )?(?:dead|broken"
        r"|removed|gone|deprecated|outdated|missing|invalid)|(?:does|do|did)(?:n'?t"
        r"| not) (?:exist|work|load|open))\b",
        r"\b(?:does|do|did)(?:n'?t| not) (?:exist|apply|add up|match)\b",
        r"\b(?:result|output|answer|value|total|sum|number|date|fee|price|name|it|that"
        r"|this)s? (?:should|must|ought to)"
        r" (?:be|have been|say|read)\b",
        r"\b(?:is|are|was|were|be) (?:\w+ )?(?:off by|mixed up|out of date|made up"
        r"|the other way (?:a)?round)\b",
        r"^(?:that'?s the |the )?wrong (?!to|with|in|on|about|at|is|was)\w+(?=[.,!;]|$)",
        r"\byour (?:\w+ )?(?:answer|code|script|solution|dates?|numbers?|formula"
        r"|example|translation|function|query|regex|command|link|version|list|table"
        r"|output|result) (?:still |only |just )?(?:throws?|fails?|crash\w*|breaks?"
        r"|does(?:n'?t| not)"
        r"|did(?:n'?t| not)|gives? (?:me )?(?:an|the wrong|a wrong)|returns? (?:an"
        r"|the wrong|nothing)|raises?"
        r"|contradicts?|ignores?|misses)\b",
        r"\b(?:output|result|file|page|screen|table|list|response|answer)s? (?:is|are"
        r"|was|came out|comes out)"
        r" (?:\w+ )?(?:empty|blank|garbled|cut off|truncated|missing)\b",
        r"^(?:thanks|thank you|(?:good|nice) try|great|ok|okay|sorry|yes|close|hm+"
        r"|almost)[,.! ]+(?:but|however)\b[^.!?;]*"
        r"(?:\bnot\b|n'?t\b|\bwrong\b|\bshould\b|\bi (?:need|want|ask)\w*|\b(?:is"
        r"|are) for\b|\bstill\b"
        r"|\bmissing\b|\boff\b|\btoo\b|\bdifferent\b)",
        r"\bnothing (?:happened|happens|changed|changes)\b|\b(?:it|that|this) (?:did"
        r"|does|changed) nothing\b|\bno (?:effect|luck)\b",
        r"^(?:it |that |this |hm+,? |sorry,? )?(?:does(?:n'?t| not)|did(?:n'?t| not)"
        r"|not) (?:work(?:ing)?|help(?:ful|ing)?|compile|run"
        r"|good enough|useful|enough)\b",
        r"\bi (?:don'?t|do not) (?:think|believe) (?:that|this|it|you)(?:'?s|'?re| is"
        r"| are| was)? (?:\w+ )?(?:right|correct|true|accurate"
        r"|so|works?)\b",
        r"\b(?:this|that|it) (?:will not|won'?t|can'?t|cannot) (?:work|be right"
        r"|be true|be correct|compile)\b",
        r"\b(?:that|this|it)(?:'?s| is) (?:a different|another|an older?|the old"
        r"|the wrong|some other)"
        r" (?!question|topic|matter|story|thing|problem)\w+",
        r"\bi (?:don'?t|didn'?t|did not|do not) want\b[^.!?;]*\bi (?:want|need|ask)\w*",
        r"^(?:well,? |but |no,? )?actually,? (?:it|that|he|she|they|the \w+) (?:is|was"
        r"|were|are|has|had|should|does|did)(?:n'?t)?"
        r" (?!great|good|fine|work|perfect|really|very|pretty|ok|nice|what|exactly"
        r"|helpful|interesting)[^?]*$",
        r"\b(?:throws?|raises?|gives me|gave me|i get|i got) (?:a|an"
        r"|the)(?: same)? (?:\w+ )?\w*(?:error|exception)\b",
        r"\b(?:that|this|it|answer|code|result|output|formula|date|number|link|translation|example)"
        + _IS
        + r"(?: \w+ly| still| just| all| also| so)*"
        r" (?:wrong|incorrect|inaccurate|false|untrue|mistaken|nonsense|outdated"
        r"|not (?:\w+ )?(?:right|correct|true|accurate|working|what|how))\b",
        _IT + r" (?:is|was)n'?t (?:\w+ )?(?:right|correct|true|accurate|working|what|how)\b",
        r"\byou(?:'?re| are| were) (?:\w+ )?(?:wrong|mistaken|incorrect)\b",
        r"\byou (?:\w+ )?(?:misunderstood|misread|misheard|forgot|ignored|missed (?:the|my|a)"
        r"|made (?:an?|another|the same) (?:\w+ )?(?:mistake|error)"
        r"|got (?:it|that|this|the \w+) wrong)\b",
        _IT + r" (?:still |also )?(?:does|did)(?:n'?t| not)"
        r" (?:work|help|answer|compile|run|solve|fix|make sense)\b",
        r"^(?:no|nope|nah)\b[,.!; ]+(?:i|we) (?:meant|said|asked|wants?|wanted|needs?|needed)\b",
        r"^(?:no|nope|nah)\b[,.!; ]+(?:it|that|this|he|she|they)" + _IS + r"\b",
        r"^(?:no|nope|nah)\b[,.!; ]+not (?:that|this|the|what)\b",
        r"\bnot (?:\w+ )?what i (?:asked|meant|wanted|said|needed|was (?:asking|looking))\b",
        r"\bi (?:didn'?t|did not|never) (?:ask|asked|say|said|mean|meant)\b",
        r"\bi (?:meant|said|asked for|wanted) [^.!?;]{1,80}, not\b",
        r"^(?:wrong|incorrect|false)\b(?=\s*(?:[.,!;]|again|answer|$))",
        r"^not (?:quite |really |exactly )?(?:right|correct|true)\b",
        r"\bstill (?:wrong|incorrect|broken|failing|not (?:working|right|correct))\b",
        r"\bstill (?:get|gets|getting|see|throws?|fails? with)\b[^.!?;]{0,30}\berror\b",
        r"\bwrong again\b|\b(?:bad|terrible|useless|wrong) answer\b",
        _IT + r"(?:" + _IS + r" (?:not helpful|unhelpful|useless)| makes no sense)\b",
        r"\byou (?:didn'?t|did not|still haven'?t) answer",
        r"\b(?:when|if|after|as soon as|once|every time) i (?:run|try|execute|compile|open|paste"
        r"|start"
        r"|call|import|use|follow|click|press) (?:it|that|this|your|the)\b[^?]*\b"
        + _FAILS_EN
        + r"\b[^?]*$",
        r"\b(?:i (?:now |still |just )?(?:get|got)|(?:it|this|that|which) (?:now |still "
        r"|just )?(?:gives?"
        r"(?: me)?|throws?|raises?|fails? with|dies with|ends (?:in|with))) (?:an? |the )?(?:\w+ )?"
        r"\w*(?:error|exception)\b[^?]*$",
        r"[^.!?;]{3,}, (?:but |and |yet )?you(?:'?ve| have)? (?:wrote|put|typed|spelled|called"
        r"|listed"
        r"|answered|assumed|used|gave(?: me)?|counted|added|translated)\b[^?]*$",
        r"\byou(?:'?re| are) (?:describing|talking about|thinking of|quoting|assuming|answering"
        r"|referring to|looking at|still (?:using|talking|writing|giving))\b[^?]*$",
        r"\b(?:that|this|it|those|these|they|which|the \w+)(?: \w+){0,2} (?:was|were|has been"
        r"|have been"
        r"|got|(?:have|has)) (?:\w+ )?" + _GONE_EN + r"\b[^?]*$",
        r"\b(?:these|those|they|that|this|it)(?:'?s|'?re| is| are| was| were)(?: all| only| just)?"
        r" (?:for|in|from|about|on|at)\b[^.!?;]{1,40}(?:,| and| but) (?:and |but |while )?(?:i|we"
        r"|my"
        r"|mine|ours?|i'?m|we'?re)\b[^?]*$",
        r"\b(?:i|we)(?:'m|'re|'ve| am| are| have| use| live| need| run| speak| own| work"
        r"| asked| want(?:ed)?)\b[^.!?;]{1,40}(?:,|;| but| and) (?:but |and |so )?(?:these|those"
        r"|that|this"
        r"|it|your|yours|the)\b(?: \w+)?(?:'?s|'?re| is| are| was| were| assumes?| only| needs?"
        r"| requires?) (?!why|great|good|fine|perfect|how|all|ok)[^?]*$",
        r"\bthere(?:'?s| is| are| was| were)(?: still| no)? [^.!?;]{1,30} in (?:that|this|your"
        r"|the) " + _MADE_EN + r"\b[^?]*$",
        r"^(?:hm+,? |wait,? |but |really\? ?|huh,? "
        r"|oh,? )?i (?:always )?thought (?:\w+ ){1,3}(?:was|were|is"
        r"|had|did|could|would|should)\b(?! (?:\w+ )?(?:great|good|helpful|nice|fine|funny|perfect"
        r"|interesting|brilliant|clear))",
        r"\b(?:has|have|there(?:'s| is| are)) no (?:such )?\w+(?: \w+)? (?:called|named"
        r"|by that name"
        r"|like that)\b[^?]*$|\bno such \w+\b[^?]*$",
        r"\b(?:divided by|times|plus|minus|multiplied by|squared)\b[^?]*\b(?:is|gives|equals"
        r"|makes)\b"
        r"[^?]*$",
        r"^👎+$",
    ),
)

CORRECTION_ZH = RuleSet(
    Signal.CORRECTION,
    "zh",
    masks=(
        r"我的(?!问题|意思|要求|需求|话|注释)[^,。!?;]*",
        r"(?:他|她|他们|老板|同事|别人|有人|大家|医生|老师)[^,。!?;]{0,4}(?:说|觉得"
        r"|认为)[^,。!?;]*",
        r"^不是我(?!要|问|说|想|指|需)[^,。!?;]*,(?:而)?是[^,。!?;]*",
        r"(?:以前|过去|原来|从前|小时候)我[^。!?;]*",
        r"(?:现在|今天|明天|这会儿?|暂时|周末|晚上|上午|下午)不行",
        _QUESTION_ZH,
        _OWN_ZH,
        r"对不对|是不是|不是吗|行不行|不对[称等外]",
        r"(?:哪里|哪儿|哪一步|什么地方|有什么|有没有|为什么|为何)[^,。!?;]{0,6}(?:不对"
        r"|不正确|错了?|不行)",
        r"没错|不错|错过|错综|错别字",
        r"我(?:自己|刚才|之前|好像|可能)*(?:搞|弄|写|看|记|理解|打|说|算)?错了",
        r"(?:如果|要是|万一|假如)[^,。!?;]{0,10}(?:不对|不正确|不行|没用|错了?)",
        r"(?:不对|不正确|不行|错了?|没用)(?:吗|么|的话|怎么办)",
        r"^不[,]?(?:谢谢|用|客气|必|需要)[^,。!?;]*",
        r"没有?用(?:过|到|户|的)|用不了(?:多|几)",
    ),
    patterns=(
        r"差得?[太很好]?(?:远|多)|不沾边|不着边",
        r"我(?:刚才|前面|明明|都|不是)?(?:说|讲)(?:过|了?(?:要|不要|别|是|的是))",
        r"反了[吧啊呀]|你(?:再|重新|好好|自己)+(?:算|看|查|检查|核对|想|数|读|试)",
        r"报错了?(?=[,。!;]|$)|按你[^。!?]*(?:卡|报错|不|没|失败|死|崩)|(?:卡死|崩溃"
        r"|闪退|死机|黑屏)",
        r"不是这(?:个|家|本|种|张|篇|里|样|么)|不是[^,。!?;]{1,8},(?:而)?是|我(?:指|找"
        r"|要|说|问)的(?:不|可)?是",
        r"只(?:列|写|给|答|说|做|翻译|改|算)了|查不到|没(?:人|谁)(?:让|叫|要)你|谁让你",
        r"(?:你|这里|里面|答案|总结)[^,。!?;]{0,4}没(?:有)?(?:写|提|说|列|讲|包括)"
        r"|没(?:写|提|列)(?:到|上)?(?=[,。!;]|$)",
        r"正确(?:的)?(?:答案|结果|做法)?(?:应该|应)?[是为]|没有?什么?(?:区别|变化|改善|差别)",
        r"(?:页面|程序|功能|登录|系统|网站|软件|显示)[^,。!?;]{0,3}(?:坏|崩|挂|乱)了",
        r"你(?:还是|根本|并)?没有?(?:看懂|理解|看清|听懂|读懂|按|照|考虑|搞懂|仔细|认真|明白)",
        r"你(?:\w{0,2})?(?:漏|落|少|忘|跳过|忽略|遗漏|混淆|搞混|弄混)(?:掉|了|写|算|说|加)",
        r"(?:已经|早就|根本|早已|现在)(?:没有了?|不存在|不是|失效|过时|过期|废弃|下架"
        r"|取消|改)[^,。!?;]{0,6}(?:了|这|那|的)?(?=[,。!;]|$)",
        r"(?:内容|信息|数据|资料|答案|版本|链接|网址|网页|引用"
        r"|出处)[^,。!?;]{0,4}(?:太旧|过时|过期|旧了|不全|有误|是?错|失效|打不开|不准"
        r"|不存在|有问题)",
        r"不应该[啊吧呀]|(?:应该|其实|明明)是[^,。!?;]{1,12}(?:才对|吧)?(?=[,。!;]?(?:不是|$))",
        r"(?:还是|依然|仍然|依旧|又)[^,。!?;]{0,4}(?:打不开|报错|失败|不行|不能|没反应"
        r"|没用|空的?|零|太[长短多少]|一样的?错|同样|错)",
        r"没有?(?:任何|什么)?(?:反应|效果|变化|作用)",
        r"(?:跟|和|与)我(?:问|说|要|想|提)[^,。!?;]{0,6}(?:没关系|无关|不一样|不符"
        r"|不是一回事)|不是一(?:回|码)事",
        r"矛盾|[反颠]倒了|反了(?=[,。!;]|$)|弄混|搞混|张冠李戴",
        r"编译(?:不过|报错|出错|失败|不了)|(?:代码|程序|脚本|公式|步骤|计算)(?:里|中"
        r"|还)?有(?:问题|错|误|bug)",
        r"胡说|瞎说|乱说|瞎编|编造|扯淡|离谱|跑题",
        r"同样的(?:错|问题|报错|毛病)",
        r"试[过了]+[,。]?(?:没有?用|不行|还是|不能)",
        r"^(?:不[,]?){2,}|我(?:不是|没)要(?:这|那|你)|我要的不是|我不(?:是)?要(?:这|那)",
        r"是错的|(?:加起来|算出来|结果|总数|数字|日期|年份|名字"
        r"|单位)[^,。!?;]{0,8}(?:不对|不等于|有误|不符)",
        r"没说(?:到|清)|说得不(?:对|清)|(?:答|写|做|翻译|算)得?不(?:对|全|完整)",
        r"不对|不正确|不准确|不[太大]对|回答是?错误|没有?回答我",
        r"(?:你|这|那|答案|结果|代码|公式|翻译|日期|数字)[^,。!?;]{0,6}(?:错了|错的|有误)",
        r"(?:理解|搞|弄|写|算|答|说|翻译|拼|看)错(?:了|[,。!]|$)",
        r"^错(?:了|误)?(?=[,。!;]|$)|还是错|又错|全错",
        r"答非所问|文不对题",
        r"不是(?:这样|这个意思|那个意思|我(?:想|要|问|说|需))|^不是这个(?=[,。!;]|$)",
        r"^不(?:是)?,",
        r"我(?:说|问|要|指|想要|想问|需要)的(?:不)?是",
        r"我没有?(?:问|说|要你|让你)|我不是(?:问|说|要|让你)",
        r"(?:还是|仍然|依然|依旧)(?:不行|不对|报错|有错|没用|失败|不能用|出错)",
        r"没有?解决|没有?用(?=[,。!;]|$)",
        r"跑不(?:通|起来)|(?:运行|使用|编译|用)不了",
        r"不行(?=[,。!;]|$)",
        r"(?:不|没有?)(?:符合|满足)我?的?(?:要求|需求|需要)",
        r"你(?:误会|误解|弄反|搞反|漏|忘)了",
        r"你[^,。!?;]{1,5}的(?:是|都是|却是)[^,。!?;]{1,14},(?:但|可|而|可是)?(?:是)?我(?:要|问"
        r"|说|想|指"
        r"|需要)",
        r"(?:早就|早已|已经|去年就?|前年就?|上个?月就?|今年就?|前几年就?)[^,。!?;]{0,6}(?:搬走"
        r"|搬家|关门|关闭"
        r"|倒闭|停产|停用|停售|取消|下架|改名|废除|去世|离职|换人|卸任|涨价|合并|退役)"
        + _NOT_ASKED_ZH,
        r"(?:新版|新版本|最新版|版本)(?:里|中|以后|之后)?[^,。!?;]{0,4}(?:改名|移除|移走|删除"
        r"|删掉|去掉|弃用"
        r"|废弃|不支持|取消)" + _NOT_ASKED_ZH,
        r"(?:^|[^我们])(?:写|说|算|看|译|打|弄|搞|念|认|标)成了?[^,。!?;]{1,10}了(?=[,。!;]|$)"
        + _NOT_ASKED_ZH,
        r"明明(?:有|是|在|没|写|就|不|只|说|要|已|可|应|告)" + _NOT_ASKED_ZH,
        r"我(?:想|要|问|说|指|找|订|查|买|需要|讲|提)[^,。!?;]{0,2}的(?:可|不)?是(?!不是)"
        + _NOT_ASKED_ZH,
        r"^我又(?:没|不)" + _NOT_ASKED_ZH,
        r"(?:执行|运行|试|点|打开|安装|按|装|跑)[^。!?]{0,8}(?:提示|显示|报|出现|弹出"
        r"|说)[^。!?]{0,10}"
        r"(?:错误|失败|不足|找不到|不存在|拒绝|异常|无法|error)" + _NOT_ASKED_ZH,
        r"(?:这些?|你(?:说|给|写|列)的?)[^,。!?;]{0,10}(?:找不到|没找到|不存在|打不开|用不了)"
        + _NOT_ASKED_ZH,
        r"(?:那时|那会儿|当时|那年)(?!我)[^,。!?;]{0,6}(?:还没|没有|还不|已经|早就)"
        + _NOT_ASKED_ZH,
        r"^👎+$",
    ),
)

_PRAISE = (
    r"(?:perfect|excellent|awesome|brilliant|wonderful|amazing|fantastic|great|exactly|correct"
    r"|spot on|nice one)"
)

CONFIRMATION_EN = RuleSet(
    Signal.CONFIRMATION,
    "en",
    masks=(
        _QUESTION_EN,
        r"^no[,. ]+(?:thanks|thank you|problem|worries|need)\b[^?]*$",
        r"\b(?:thanks|thank you) in advance\b|\b(?:a|an|the|to) (?:big )?(?:thanks?"
        r"|thank you)\b|\bthank you (?:note|letter|card)\b",
        r"^(?:thanks|thank you)[,.! ]+(?:but|however)\b",
        r"(?:\b(?:if|whether|how|why|when|until|unless|hope|hopefully|wish|sure|check|ensure"
        r"|explain|assuming|doubt|think|not|never|because|know|way)|n'?t)"
        r"(?: \w+){0,2} (?:that|this|it|everything|you)\b[^,.!?;]*",
        r"(?:^|[.,!?;] ?)(?:does|did|is|was|has|can|could|will|would)(?: \w+){0,2}"
        r" (?:that|this|it|everything)\b[^,.!?;]*",
        r"\b(?:before|say|says|saying|tell(?:ing)? (?:me|us)|claim(?:ing)?|pretend)(?: that)?"
        r" (?:that|this|it|everything|all)\b[^,.!?;]*",
        r"\bworks (?:by|as|like(?! a charm)|in|on|when|at|under)\b",
        r"\b(?:works|correct|right|perfect|makes sense)\s*\?",
        r"\bmakes sense to\b|\buseful (?:for|to|when|in)\b|\bhelpful (?:for|to|if)\b",
        r"\bright (?:there|here|now|next|before|after|angle|side|hand)\b",
        r"\bworked (?:\w+ )?(?:before|until|yesterday|earlier)\b|\b(?:was|were|been) working\b",
        r"^"
        + _PRAISE
        + r"\b.*\b(?:but|however|unfortunately|another (?:error|bug|problem)|broken|still)\b",
        r"(?:\bnot|n'?t|\bless|\bmore|\bmost) (?:\w+ )?(?:helpful|working)\b",
    ),
    patterns=(
        _START + r"(?:thanks|thank you)(?: \w+)? for (?:\w+ing|the|your|all|this|that)\b[^?]*$",
        r"\bjust what (?:i|the)\b|^(?:yay|hooray|woohoo|finally[!.]|bingo|bravo"
        r"|spot on|sorted|fixed[!.,])|^yes+!|[!.] ?finally[!.]*$",
        r"^(?:ok(?:ay)?,? |that |this |it |all )*looks (?:good|great|right|perfect"
        r"|fine|correct)\b|\byou rock\b|\bthat explains (?:it|a lot|why)\b",
        r"\bnow i (?:finally )?(?:get|see|understand|know) (?:it|why|how|what)\b(?! to)"
        r"|^(?:perfect|great|ideal|lovely|exactly the right) \w+[.! ]*$",
        r"\b(?:that|this) did it\b|\bmakes (?:total|complete|perfect|so much"
        r"|a lot more) sense(?=[,.!]|$)"
        r"|\b(?:saved|made) (?:my|me|us|our) (?:\w+ )?(?:day|week|weekend|life|hours|time|night"
        r"|trip)\b"
        r"|\b(?:that|this) was (?:it|the (?:missing piece|problem|culprit|cause|issue"
        r"|reason))(?=[,.!]|$)",
        r"\b(?:i'?m|we'?re) (?:all|good to) (?:set|go)\b|\bgood catch\b"
        r"|\byou were (?:\w+ )?right\b",
        r"\b(?:runs?|works?|loads?|is) (?:\w+ )*(?:faster|fine|smoothly|better"
        r"|as fast) now\b|\b(?:arrived|received it|got it)[,.! ]+thank",
        r"\b(?:that|this|it)(?:'?s| is| was) (?:\w+ )?(?:a |an )?(?:really |very "
        r"|so )?(?:clear|good|great|helpful|useful|quick|fast|brilliant|nice|neat"
        r"|elegant) ?(?:answer|explanation|solution|example|idea|summary)?(?=[.,!]|$)",
        _START + r"(?:great|good|nice|amazing|excellent) (?:stuff|job|work|answer|one)\b",
        _START + r"(?:ok(?:ay)? |oh |yes |great |perfect )?(?:many thanks|thanks|thank you"
        r"|thx|ty|cheers)(?: (?:so much|very much|a lot"
        r"|again|a million|mate|man|buddy|all|for (?:the|your|all|all the|explaining"
        r"|helping|clarifying|checking)\b[^.!?,;]{0,30}))?"
        r"(?=[.!,;]|$)",
        r"\b(?:it|that|this|everything|the build|the (?:code|script|app|page|test)"
        r"|(?:all )?(?:the )?tests?|all)(?:'?s| is| are)?"
        r"(?: now| finally| all)? (?:compiles?|runs|passes|pass|passed|running|builds?"
        r"|fixed|green)(?=[.,!;]|$| now| fine| great"
        r"| perfectly| again| thank| for me| without)",
        r"\b(?:that|this|it|you|which)(?: \w+ly)? (?:fixed|solved|resolved) (?:the|my"
        r"|it|that|this|all|everything|our)\b",
        r"^(?:problem|issue|bug|error|case|all) (?:is |was |now )?(?:solved|fixed"
        r"|resolved|closed|gone|done)\b",
        r"(?:^|[.,!] ?)(?:that(?:'?s| is) |yes,? |oh,? |ah,? |now it(?:'?s"
        r"| is) )?(?:so )?(?:much|way|far) better(?=[.,!]|$| now| thank)",
        r"\b(?:that|this)(?:'?s| is| was) (?:exactly |just |precisely )?(?:the (?:one"
        r"|answer|thing)|what) (?:that )?i\b",
        r"\b(?<!not )what i was (?:after|looking for|hoping for)\b",
        r"^(?:super|lovely|sweet|nice|marvell?ous|cool|good|neat|wow)(?=[!.]|, (?:that"
        r"|this|it|thanks?|now|works?|i (?:now|understand|see|get|love))\b)",
        r"^(?:(?:that(?:'?s| is| was)(?: a| an)?|what (?:a|an)|very|really|wow,?"
        r"|such a) )*(?:great|good|excellent|nice|perfect|brilliant"
        r"|clear|helpful|useful) (?:answer|explanation|solution|example|summary|work"
        r"|job|one|stuff)\b",
        r"\bwell (?:explained|put|said|written)\b|\byou(?:'?re"
        r"| are)? (?:really )?a (?:legend|star|hero|gem)\b",
        r"\bnow i (?:finally )?(?:understand|get it|see)\b"
        r"|\bi (?:finally )?(?:understand|get) (?:it|that) now\b|\ball good now\b",
        r"^(?:yes|yep|yeah)[,.! ]+(?:exactly|perfect|correct|thank|it works|that(?:'?s"
        r"| is) (?:it|right|correct))\b",
        r"\bi (?:really |absolutely )?(?:love|like) (?:it|this|that|the (?:new|second"
        r"|last|first))\b",
        r"\b(?:that|this|it|everything|all)(?: \w+ly| now| all| just)*"
        r" (?:works?|worked|fixed (?:it|that|this)|solved (?:it|that|my|the)"
        r"|did (?:it|the trick)|does (?:it|the trick)|makes (?:perfect |more |a lot of )?sense"
        r"|clears? (?:it|that|things|this) up|answer(?:s|ed) my question)\b",
        r"\b(?:that|this)(?: \w+ly)? help(?:s|ed)\b|\bi (?:understand|see) now\b",
        _IT + _IS + r"(?: exactly| just)? what i (?:wanted|needed|meant)\b",
        r"\bexactly (?:what|the \w+) i (?:needed|need|wanted|want|was looking for|meant|asked)\b",
        _IT + _IS + r"(?: \w+ly| very| so| just)* (?:perfect|great|excellent|awesome|amazing"
        r"|brilliant|helpful|wonderful|fantastic|correct|right|spot on|useful|it|working)\b",
        r"\bwork(?:s|ed|ing) (?:now|perfectly|great|fine|like a charm|well|beautifully|for me)\b",
        r"\b(?:very|so|really|super|extremely|incredibly) helpful\b",
        r"\byou(?:'?re| are|'?ve been| were) (?:absolutely |totally |completely )?"
        r"(?:right|correct|the best|a (?:lifesaver|genius))\b",
        r"\b(?:problem|issue|bug|error)(?:'?s| is)(?: now)? (?:solved|fixed|gone|resolved)\b",
        r"\b(?:well done|(?:good|great|nice) (?:job|work|answer)|nicely done|i love (?:it|this))\b",
        r"^(?:ok(?:ay)?[,. ]+|ah[,. ]+|oh[,. ]+)?(?:got it|i get it now|now i get it)\b"
        r"(?! (?:wrong|from|on|in|at))",
        r"^(?:(?:ok(?:ay)?|great|perfect|awesome|cool|nice|excellent|brilliant|yes|yep|yeah|ah|oh)"
        r"[,.! ]+)*(?:many thanks|thanks|thank you|thx|ty|cheers)"
        r"(?: so much| very much| a lot| a million| again| for (?:the|your) \w+)*[.! ]*$",
        r"^(?:(?:ok(?:ay)?|yes|oh|ah|wow)[,.! ]+)?" + _PRAISE + r"(?=\s*(?:[.!,;]|$)| thank)",
        r"^[👍👌💯]+$",
    ),
)

_GOOD_ZH = r"(?:可以了|搞定|解决|成功|能用|有用|有帮助|管用|好用|明白|懂|清楚|完美|正确|理解|对的)"

CONFIRMATION_ZH = RuleSet(
    Signal.CONFIRMATION,
    "zh",
    masks=(
        _QUESTION_ZH,
        _OWN_ZH,
        r"(?:不用了?|不需要了?|不了|没问题|没事|没关系|不必了?|^不)[,!。]?(?:谢谢|感谢"
        r"|多谢)[你您了]?|先谢|提前感?谢|感谢信|不谢",
        r"(?:谢谢|感谢|多谢)[你您]?[,]?(?:但|不过|可是|可(?!以))",
        r"(?:不|没有?|未|无法|怎么|如何|怎样|才|是否|如果|要是|只要|希望|等)[^,。!?;]{0,6}"
        + _GOOD_ZH
        + r"了?",
        _GOOD_ZH + r"了?(?:吗|么|嘛|没|吧\?|的话|一半|\?|一个|的(?:做法|方法|答案))",
        r"^(?:没错|正确|对的|完美|太好了|太棒了|很好|非常好|不错)[^。!?]*(?:但|不过"
        r"|可是|然而|只是)",
    ),
    patterns=(
        r"(?:^|[,。!;])[^,。!?;不没]{0,3}太(?:强|牛|好|棒|厉害|赞|妙|爽|对)了|你?(?:真"
        r"|可真)(?:厉害|棒|行|牛)",
        r"(?<!没)(?<!不)成功了|(?:你|都)?说对了|还真是|原来如此|一针见血|正合我意|透彻"
        r"|(?:好|快|清楚)多了|快了[^,。!?;]{0,2}倍",
        r"(?:到账|收到|修好|处理好|改好|装好)了(?=[,。!;]|$)|终于好了|好极了|看起来没问题|就这样吧",
        r"(?:讲|说|写|解释|回答)得?真?(?:真|很|太|好|非常)?(?:透彻|明白|清楚|到位|好"
        r"|棒|详细)(?=[,。!;了]|$)",
        r"(?:^|[,。!;~])(?:真的?|真是|非常|十分|太|很|万分|嗯|好的?)*(?:谢谢|感谢"
        r"|多谢|谢了|谢啦|辛苦了)",
        r"(?:^|[,。!;])[^,。!?;不没]{0,6}(?:很|非常|真|太|挺|十分|特别)(?:满意|好用"
        r"|实用|棒|赞|厉害|牛|清楚|清晰|详细|到位|对)(?:了|啊|呀)?(?=[,。!;~]|$)",
        r"(?:真的?|果然|还真|居然|现在|终于)[^,。!?;不没]{0,3}(?:能|可以|会|好|行"
        r"|通)[^,。!?;不没]{0,6}了(?=[,。!;]|$)",
        r"(?:全|都|全部)(?:过|通过|对|好|成功)了(?=[,。!;]|$)|(?:受教|学到|长见识|涨知识)了"
        r"|原来是?(?:这样|这么|如此)",
        r"^(?:对[,]?)?(?:就是|正是|要的就是)(?:这个|这种|这样|那个)[^,。!?;]{0,4}(?=[,。!;]|$)",
        r"^(?:满意|好用|好使|真棒|好棒|赞|牛|成了|搞定)(?=[,。!;~了]|$)|(?:弄|修|改|装"
        r"|已经)好了(?=[,。!;]|$)",
        r"(?<!不)(?<!没)(?:能|可以|终于|成功|已经能?)(?:打开|运行|跑|登录|登上|安装"
        r"|编译|显示|下载|连上|看到|正常\w{1,2})了",
        r"(?:编译|测试|运行|安装|验证)(?:都|全|全部)?(?:通过|成功)(?=了|[,。!;]|$)",
        r"(?:搞|弄|看|听|学)(?:懂|明白|清楚|会)了|(?:这下|终于)\w{0,2}(?:清楚|明白|懂)了",
        r"就(?:用|要|是)(?:这个|它|这样)了?(?=[,。!;了]|$)|说得太?对",
        r"省了?(?:我|不少|很多|好多)[^,。!?;]*(?:时间|功夫|事)|帮(?:了)?(?:我)?大忙",
        r"可以了(?!解)|可以用了|搞定了?|解决了(?=[,。!;~]|$|谢|多谢|感谢|我的|这个问题)",
        r"(?:这次|这下|终于)(?:对|好|行)了",
        r"成功了|(?:运行|编译|测试|安装)成功|跑通了|能[用跑]了|好使了",
        r"(?:很|非常|挺|太|真|十分|特别|确实|对我)(?:有用|有帮助|管用|好用)"
        r"|帮了?我?(?:大忙|很大的忙)",
        r"正是我(?:想|需|要|找)|就是(?:这样|这个|我想要的)(?=[,。!;了]|$)",
        r"^(?:没错|正确|对的|对对对|完全正确|完美|太好了|太棒了|很好|非常好|好极了"
        r"|太赞了|不错|厉害)"
        r"(?=[,。!;~]|$|谢|多谢|感谢)",
        r"(?:明白|懂|清楚)了(?=[,。!;~]|$|谢|多谢|感谢)",
        r"(?:回答|解释|讲|说)得?(?:很|非常|真|太)(?:好|棒|清楚|详细|准确|到位)"
        r"|你?说得?对(?=[,。!;]|$)",
        r"效果(?:很好|不错|非常好)",
        r"^(?:(?:好[的了]?|嗯+|ok|行|明白|可以|对|是的)[,。! ]*)?"
        r"(?:谢谢|多谢|感谢|谢了|(?:非常|十分|太)感谢)(?:你|您|啦|了|的(?:帮助|回答"
        r"|解答)|[!。~])*$",
        r"^[👍👌💯]+$",
    ),
)

_FORM_VERB_EN = (
    r"(?:use|write|keep|put|show|add|include|skip|drop|give|explain|list|cite|quote|avoid|start|end"
    r"|finish|begin|close|open|limit|round|label|mark|number|bold|highlight|make (?:it|every"
    r"|each|all|sure)"
    r"|shorten|split|break|format|indent|answer|reply|respond|speak|talk|say|refer|address"
    r"|leave|remove|replace|spell|describe|present|structure|wrap|state|name|separate|capitali[sz]e"
    r"|phrase|stay|return|output|ask|define|express|type|sign|cut|reduce|turn|underline|trim|stick"
    r"|tell (?:me|us)(?! about)|walk me through)"
)
_FORM_EN = (
    r"(?:exclamation marks?|emojis?|bullets|bullet points?|headings?|headers?|subheadings?"
    r"|line breaks?"
    r"|(?:bulleted|numbered|bullet) lists?|(?:as|in|into) (?:a|the|one) (?:\w+ )?(?:list|table)"
    r"|tables"
    r"|markdown|json|yaml|csv|html|latex|plain text|code blocks?|tone|wording|layout|formatting"
    r"|format"
    r"|metric|imperial|celsius|fahrenheit|pounds|euros|dollars|kilomet(?:er|re)s|miles"
    r"|percent(?:ages?)?"
    r"|decimals?|decimal places|digits|whole (?:numbers?|euros|dollars|pounds)|sources|references"
    r"|citations?|quotation marks|footnotes?|page numbers?|analogy|analogies|metaphors?"
    r"|comments|docstrings?|annotations?|type hints?|your working|workings|reasoning|assumptions"
    r"|tl;?dr|greetings?|sign-?off|disclaimers?|apolog(?:y|ies)|adjectives?|jargon|slang|acronyms?"
    r"|abbreviations?|contractions|spelling|punctuation|pronouns?|first person|second person"
    r"|third person|present tense|past tense|passive|capitals?|upper ?case|lower ?case|snake_case"
    r"|camel ?case|indentation|single quotes|double quotes|semicolons?|variable names?|f-strings?"
    r"|time ?zones?|utc|24-hour|12-hour|alphabetical(?:ly)?|chronological(?:ly)?|layman'?s"
    r"|plain (?:language|words|english)|plainly|simply|briefly|formally|informally|politely"
    r"|concisely"
    r"|verbatim|step by step|point by point|at a time|in (?:english|german|french|spanish|italian"
    r"|chinese|japanese|russian)|(?:british|american) \w+)"
)
_CONTENT_EN = (
    r"(?:titles?|summary|recap|takeaways?|conclusion|introduction|intro|questions?|examples?|words?"
    r"|sentences?|paragraphs?|lines?|lists?|tables?|columns?|bullets?|points?|links?|quotes?|steps?"
    r"|sections?|code|details?|explanations?|names?|numbers?|dates?|units?|original|style|voice"
    r"|replies"
    r"|answers?|everything|history|background|theory|calculations?|parts?|figures?)"
)
_CHANGE_EN = (
    r"(?:skip|drop|leave out|avoid|limit|shorten|split|break|keep|finish|end|begin|number|bold"
    r"|highlight"
    r"|label|indent|cut|trim|reduce|stick to|wrap|capitali[sz]e|separate|underline|round"
    r"|tone down|quote"
    r"|cite|make (?:every|each|all)|(?:ask|give|show|list|offer|suggest) (?:me )?(?:at most"
    r"|no more than"
    r"|only|just|up to))"
)
_TASK_OF_EN = (
    r"(?![^.!;]*\b(?:list|table|summary|examples?|story|poem|sentences?|words?|questions?"
    r"|paragraphs?"
    r"|titles?|email|lines|comparison) (?:of|about|for|on|to|between|from|where|in which)\b)"
)
_NO_QUESTION_EN = r"(?![^.!;]*\?)"
_CLAUSE_EN = (
    r"(?:(?:^|[.;!:] ?)(?:(?:please|pls|also|and|but|ok|okay|now|just|always|so|then|next time"
    r"|in future)"
    r"[, ]+)*|, (?:please |just |and |but )?)"
)

DIRECTIVE_EN = RuleSet(
    Signal.DIRECTIVE,
    "en",
    masks=(
        r"(?:^|[.!;?] ?)(?:and |but |so )?(?:what|how|why|when|where|who|which)\b[^.!;?]*\?",
        r"\bnever (?:mind|ever mind)\b",
        r"(?<!you )\b(?:should|can|could|may|do|would|how|why|what)(?: \w+)? (?:i|we|they|people)"
        r" (?:\w+ )?\w+[^.!?;]*",
        r"\bnext time (?:i|we|he|she|they)\b",
        r"\bi(?:'?ll| will|'?d)? (?:\w+ )?use\b[^.!?;]*",
    ),
    patterns=(
        r"^(?:please |now |ok,? |but |and )*(?:(?:a (?:bit|little) )?(?:shorter|longer"
        r"|simpler|slower|clearer|softer)|(?:more|less|fewer) \w+)[,. ]*(?:please|pls"
        r"|now)?[.! ]*$",
        r"\bin (?:the )?future\b,?(?: please| always| just)? \w+|\bthis time\b"
        r"|\bevery time\b,? (?:you|please)",
        _CLAUSE + r"(?:do|solve|compute|work out|calculate|check|verify|find|look|search"
        r"|answer|try)\b[^.!?;]{0,40}\b(?:with|using|in|via|on) (?:the|a"
        r"|your) (?:\w+ )?(?:tool|calculator|search|api|docs?|documentation|database"
        r"|browser|terminal)\b",
        r"\b(?:in|at most|no more than|maximum|max) (?:at most |no more than )?(?:one"
        r"|two|three|four|five|ten|a few|\d+) (?:short )?(?:words?|sentences?"
        r"|bullet points?|bullets|points|lines|paragraphs?)\b[^?]*$",
        r"^(?:and |but )?you (?:can|may|need not|don'?t (?:need"
        r"|have) to) (?:\w+ )?(?:skip|leave out|drop|omit|stop|add|include|be|greet"
        r"|say|explain)\b",
        _CLAUSE + r"(?:write|format|show|give|print|use|spell|express) (?:all|every|each|any"
        r"|the) (?:dates?|numbers?|names?|units?|times?|prices?|code|amounts?"
        r"|variables?|answers?|diff)\b",
        _CLAUSE + r"(?:ask|check|confirm|warn)(?: me| with me)? (?:first|before)\b"
        r"|\blook (?:it|that|this) up\b",
        _CLAUSE + r"use (?:my|his|her|our|their) (?:\w+ )?(?:name|title|pronouns?|format|style"
        r"|template|nickname)\b",
        _CLAUSE + r"(?:don'?t|do not|never) (?:touch|change|edit|remove|delete|move|rename"
        r"|guess|invent|assume|skip|shorten|translate|summari[sz]e|hallucinate"
        r"|make)\b",
        _CLAUSE + r"(?:talk|speak|write)(?: to me| back)? (?:like|as|in)\b[^?]*$|\b(?:run|do"
        r"|read|check|list|test) [^.!?;]{1,40} first,? (?:and|then)\b",
        r"\b(?:could|can|would) you (?:please )?(?:stick to|keep (?:it|your)|stop"
        r"|avoid|be more|be less|use fewer|use less|from now on)\b",
        _CLAUSE + r"(?:and |but |now )?(?:(?:always|never) (?!mind|the)\w+|stick (?:to|with) "
        r"|leave out |skip the |drop the |cut the |omit |limit "
        r"|shorten|simplify|rephrase|rewrite (?:it|this|that)\b)",
        r"\b(?:give|show|tell|send|return|write|list)(?: me| us)? (?:just|only)\b"
        r"|\bjust (?:give|show|tell|send) (?:me|us)\b",
        r"[,.;] ?(?:no|without(?: any)?) (?:more )?(?:explanations?|comments?|emojis?"
        r"|bullet points?|markdown|preambles?|introductions?|jargon"
        r"|apologies|headings?|prose)\b",
        _CLAUSE + r"instead of [^.!?;]{1,60}, \w+",
        r"^(?:(?:and|but|please|no)[, ]+)?(?:before|after|when(?:ever)?|every time"
        r"|each time|if) you [^,.!?;]{1,50},? "
        r"(?:please |first |always |do |don'?t |never )?(?:make|check|ask|run|read"
        r"|call|use|write|tell|look|search|test|say|list|show|wait|save)\b",
        r"^(?:please |just |ok,? )?call me (?!back|later|when|if|tomorrow|a)\w+",
        _CLAUSE + r"(?:explain|write|say|describe|do|show|go through|tell)(?: me| it| this"
        r"| that)* (?:step by step|as if|like i'?m|in simple|in plain"
        r"|in (?:your|my) own|one by one)",
        r"(?:[:,] |^)first,? (?!of all|come|i\b|we\b|he\b|she\b|they\b|it\b|the\b|time"
        r"|name|day)\w+[^.!?]{0,160}?\bthen\b",
        _CLAUSE + r"(?:and )?put (?:the|it|your|all) [^.!?;]{0,30}(?:last|first|at the (?:end"
        r"|top|beginning|start|bottom)|in (?:a|bold))\b",
        _CLAUSE + r"(?:and )?(?:use|try|take|pick|choose|do|call|run"
        r"|go with) [^.!?;]{1,60}\b(?:instead|rather than|from now on)\b",
        _CLAUSE + r"(?:use|call|run|check|ask|consult|query) (?:the|a|an"
        r"|your) [^.!?;]{1,30}(?:tool|api|search|calculator|docs?|table|syntax"
        r"|format"
        r"|units?|spelling|style|database)\b[^?]*$",
        r"\b(?:ask|check with|tell|warn) me (?:first|before)\b",
        _CLAUSE + r"(?:answer|reply|respond|output|return|write)(?: it| that| this"
        r"| everything)? (?:only |just |always )?(?:in|as|with|using) "
        r"(?:only |just |valid |plain |a |an )?(?:one|two|three|json|yaml|xml|code"
        r"|english|french|german|spanish|\w+ (?:words?|sentences?))\b",
        _CLAUSE + r"(?:add|include|mention|cite|give) (?:your |the |more |some )?(?:sources?"
        r"|references?|comments?|units?|examples?|type hints?"
        r"|citations?)\b[^?]*$",
        r"\buse [^.!?;]{1,60}? instead\b",
        r"\binstead of [^.!?;]{1,80}?,? (?:please )?(?:use|write|say|give|try)\b",
        r"\bplease (?:use|stick to)\b|(?:^|[.,;:!?] ?)use [^.!?;]{1,60} please\b",
        _CLAUSE + r"(?:do not|don'?t|never|always|avoid|stop)"
        r" (?:us(?:e|ing)|writ(?:e|ing)|add(?:ing)?|includ(?:e|ing)|repeat(?:ing)?|mention(?:ing)?"
        r"|explain(?:ing)?|answer(?:ing)?|reply(?:ing)?|say(?:ing)?|giv(?:e|ing)|mak(?:e|ing)"
        r"|put(?:ting)?|start(?:ing)?|end(?:ing)?|call(?:ing)?|apologi[sz](?:e|ing))\b",
        _CLAUSE
        + r"(?:now )?(?:answer|reply|respond|write|rewrite|say|explain|format|output|return)"
        r"(?: it| that| this| everything)? (?:only |always )?(?:in|as|using) ",
        r"\b(?:keep|make) (?:it|this|that|them|(?:your |the )?(?:answers?|repl(?:y|ies)))"
        r" (?:\w+ )?(?:short|shorter|brief|simple|simpler|concise|formal|informal|longer|polite"
        r"|friendl(?:y|ier)|under|below|more|less)\b",
        r"\b(?:from now on|going forward|next time)\b",
        r"(?:^|[.;!] ?|\bplease |\byou should )first,?"
        r" (?!of all|i\b|we\b|he\b|she\b|they\b|it\b|the\b|time|name|day)\w+[^.!?]{1,160}?\bthen\b",
        r"\byou should(?:'?ve| have)? (?:\w+ )?(?:used?|be|been|answer(?:ed)?|check(?:ed)?"
        r"|ask(?:ed)?|mention(?:ed)?|include[d]?|start(?:ed)?)\b",
        _CLAUSE + r"be (?:more|less|brief|concise|polite|formal|honest|specific)\b",
        r"(?:"
        + _CLAUSE
        + r"|\b(?:could|can|would|will) you (?:please |also )?)(?:put|show|present|lay out"
        r"|list|give|arrange|format|display|sort|group|order|split|break|return"
        r"|write)(?: me)? (?:the|all"
        r"|them|it|these|those|this|that|your|everything|each|every)\b[^.!?;]{0,40}\b(?:in|as"
        r"|into|by)"
        r" (?:an? |the )?(?:\w+ )?(?:tables?|lists?|bullets?|bullet points|columns?|rows?|csv|json"
        r"|markdown|order|sections?|paragraphs?|steps?|date|name|price|size|size order"
        r"|categor(?:y|ies))\b",
        _CLAUSE
        + r"(?:also |always )?(?:cite|quote|reference|number|label|date|justify|back up|underline"
        r"|highlight|bold) (?:the|your|each|every|all|any|it|them|which)\b[^?]*$",
        r"\b(?:\d+|one|two|three|four|five|six|ten|twenty|fifty|a few"
        r"|a couple of) (?:short )?(?:words?"
        r"|sentences?|lines?|paragraphs?|bullets?|bullet points?|points?|items?|characters"
        r"|examples?)"
        r" (?:max(?:imum)?|at most|or (?:less|fewer)|tops|only|please|is enough|will do)\b",
        _CLAUSE
        + r"(?:keep (?:it|this|that|them) )?(?:under|within|below|at most|no more than|max(?:imum)?"
        r"|up to) (?:\d+|one|two|three|five|ten) (?:words?|sentences?|lines?|characters"
        r"|paragraphs?)\b",
        _CLAUSE
        + r"(?:run|check|test|verify|read|search|look|ask|confirm|try|compile)\b[^.!?;]{1,50}"
        r"\bbefore (?:you\b|answering|replying|writing|claiming|suggesting|telling|changing"
        r"|giving)[^?]*$",
        _CLAUSE
        + r"(?:search|check|look|ask|try|query|read|consult)\b[^.!?;]{1,40}\bfirst\b[^?]*\b(?:then"
        r"|before|and|only)\b[^?]*$",
        r"\bi(?:'?d like| want| need| would like)\b[^.!?;]{1,50}\b(?:throughout|every time"
        r"|each time"
        r"|in (?:all|every|your) \w+|from you|everywhere)\b[^?]*$",
        r"(?:^|[.;!] ?|\bplease |\bpls |, (?:but |and )?)(?:do not|don'?t) (?!worry|mind"
        r"|mention it|know"
        r"|think|get|have|need|like|want|understand|see|remember|care|believe|bother|ask|tease"
        r"|sweat"
        r"|you|we|they|i\b|even|really|expect|trust|feel|agree)\w+ (?!\?)[^?]*$",
        r"\bi(?:'?d| would)? (?:prefer|rather have)\b",
        _CLAUSE_EN
        + _FORM_VERB_EN
        + r"\b"
        + _NO_QUESTION_EN
        + _TASK_OF_EN
        + r"[^.!;?]*\b"
        + _FORM_EN
        + r"\b",
        _CLAUSE_EN + r"(?:use|write|keep|put|start|begin|end|finish|give|show|mark|make|add|include"
        r"|explain|answer|check"
        r"|translate|name|list|state|tell|say|leave|ask|treat|read|test|wrap|label|call|spell)\b"
        + _NO_QUESTION_EN
        + _TASK_OF_EN
        + r"[^.!;?]{0,40}\b(?:every|each|always|never|everywhere|throughout|consistently)\b",
        _CLAUSE_EN
        + r"(?:give|put|state|say|tell|show|write|list|lead with|start with|keep|move|place)\b"
        + _NO_QUESTION_EN
        + r"[^.!;?]{0,40}\b(?:first|last|up front|upfront|at the (?:very )?(?:top|bottom|start"
        r"|end|beginning)"
        r"|separately|together|side by side|underneath|below it|above it)(?: please)?(?=[.,!;]|$)",
        _CLAUSE_EN
        + r"(?:mention|specify|indicate|note|flag|point out|clarify|state|mark|say|highlight)"
        r" (?:clearly |exactly |always )?(?:which|what|where|when|whether|who|if)\b"
        + _NO_QUESTION_EN,
        _CLAUSE_EN + r"(?!i\b|we\b|he\b|she\b|they\b|it\b|the\b|you\b)\w+ [^.!;?]{2,50}"
        r"\bso (?:that )?i can (?:copy|paste|read|print|scan|see|follow|compare|share|tell"
        r"|check|skim)\b",
        r"\bfrom (?:here|this point|today|now)(?: on(?:wards?)?)?,? (?!\w+ (?:to|until)\b)\w+",
        r"\bi(?:'?d| would) (?:rather|sooner|much rather|prefer to) (?:see|have|get|read|you)\b"
        + _NO_QUESTION_EN,
        r"^(?:please |and |but )*(?:less|fewer|enough (?:of |with )?(?:the|this|your)"
        r"|stop (?:with )?(?:the|your"
        r"|all)|cut (?:out )?the|(?:drop|skip|ditch|lose) (?:the|all|your|this))"
        r" \w+(?:[ -]\w+)?,?(?: please| thanks?| from now on)?[.! ]*$",
        _CLAUSE_EN
        + _CHANGE_EN
        + r"\b"
        + _NO_QUESTION_EN
        + r"[^.!;?]{0,30}\b"
        + _CONTENT_EN
        + r"\b",
        r"^(?:please |and |but )*(?:not so many|not so much|fewer|less|no more|no"
        r"|without(?: any)?) (?:\w+ )?"
        + _CONTENT_EN
        + r"\b"
        + _NO_QUESTION_EN
        + r"[^.!;?]{0,30}[.! ]*$",
        _CLAUSE_EN
        + r"(?:write|say|phrase|put|explain|describe|answer|reply|word|do|treat|speak|talk|sound)\b"
        + _NO_QUESTION_EN
        + r"[^.!;?]{0,30}\b(?:the way|as if|as though|like (?:a|an|i|you|we|it|my)\b"
        r"|for (?:a|an) \w+(?: \w+)?$)",
        _CLAUSE_EN
        + r"(?:sort|group|order|split|arrange|rank|organi[sz]e|sum|count|break)\b"
        + _NO_QUESTION_EN
        + r"[^.!;?]{0,40}\bby \w+",
        _CLAUSE_EN
        + r"(?:show|give|quote|write|convert|express|state|list|report) (?:me )?(?:all |the "
        r"|every |any )?"
        r"(?:prices?|dates?|numbers?|amounts?|times?|names?|distances?|temperatures?|results?"
        r"|values?|sizes?)\b" + _NO_QUESTION_EN + r"[^.!;?]{0,30}\b(?:in|as|to|with|per|by)\b",
        _CLAUSE_EN
        + r"(?!i\b|we\b|he\b|she\b|they\b|it\b|the\b|you\b)\w+ "
        + _NO_QUESTION_EN
        + r"[^.!;?]{2,50}\bbefore (?:you\b|any(?:thing|one|body)?\b|\w+ing\b)",
        _CLAUSE_EN
        + r"(?:when(?:ever)?|if|once|unless|as soon as|every time|each time) (?:i|you|we|a|an"
        r"|the|there|it"
        r"|something|someone|unsure|in doubt|possible|needed)\b"
        + _NO_QUESTION_EN
        + r"[^,.!;?]{0,60}, ?(?:please |just |always |do |then )?(?:tell|say|ask|give|show|use"
        r"|write|stop"
        r"|add|mark|warn|let me know|list|answer|leave|skip|reply|point|check|don'?t|do not"
        r"|never|only"
        r"|explain|mention|be|put|keep|include|start|assume)\b",
        r"^(?:please |and |but )*(?:not so|less|fewer|more|no more|no|without(?: any)?|only"
        r"|just|max(?:imum)?"
        r"|at most) (?:many |much |long )?(?:\w+ )?"
        + _FORM_EN
        + r"\b"
        + _NO_QUESTION_EN
        + r"[^.!;?]{0,30}[.! ]*$",
        r"\b(?:i (?:only|just) (?:want|need)|all i (?:want|need) is|just) (?:the|a"
        r"|an)\b[^.!;?]{1,40}"
        r"(?:\bnothing (?:else|more)\b|\bno \w+|\bthat'?s all\b|\bwithout\b)",
        r"\bit(?:'?s| is|'?d be| would be) (?:better|nicer|clearer|easier)"
        r" (?:to (?:answer|write|reply|use|say|give|start|keep|show|put|list|explain)|if (?:you"
        r"|the|it))\b" + _NO_QUESTION_EN,
        r"^(?:and |but |please |no,? )*you (?:can|may|should|must|have to|need to|needn'?t"
        r"|don'?t (?:have|need)"
        r" to) (?:always |just |also )?(?:assume|skip|use|write|answer|keep|ask|check|cite"
        r"|include|be|stop"
        r"|address|call|leave|explain|say|mention|add)\b" + _NO_QUESTION_EN,
        _CLAUSE_EN + r"(?:refer to|address|call) (?:me|us|him|her|them|it)\b" + _NO_QUESTION_EN,
        r"\b(?:i want|i need|i expect|i'?d like|make sure|be sure|ensure|remember)\b"
        + _NO_QUESTION_EN
        + r"[^.!;?]{0,20}\b(?:you to|every|each|all (?:the )?(?:answers|replies|numbers|names"
        r"|dates)|always"
        r"|never)\b",
    ),
)

_FORM_ZH = (
    r"(?:注释|出处|来源|例子|单位|日期|步骤|说明|链接|页码|编号|序号|标题|标点|拼音|翻译|税率"
    r"|理由|依据|时间|原文|过程|公式"
    r"|小标题|备注|注音|署名|称呼|表情|括号|引号|百分比|金额|祝福语?|落款|结论|要点|总结|摘要"
    r"|目录|图例|类型)"
)

DIRECTIVE_ZH = RuleSet(
    Signal.DIRECTIVE,
    "zh",
    masks=(
        r"别(?:人|的|处|墅|致|扭|急|担心|客气|错过|忘|着急|怕|管|走|想)|不用(?:了|谢"
        r"|客气|急|担心|管|着急)|不要(?:紧|急|担心|钱)|不必(?:了|客气)",
        _QUESTION_ZH,
        r"请问|请用餐|先生|先进|先后|先前|优先|首先",
        r"先(?:去|到|坐|吃|走|飞|买|上|下|学|看)[^,。!?;]{1,12}(?:再|然后|后)(?:去|到|坐|吃|走"
        r"|飞|买|上|下|学|看)"
        r"[^,。!?;]*",
        r"(?:以前|过去|原来|从前|小时候)我[^。!?;]*",
        r"(?:写|说|算|看|译|打|弄|搞|念|认|标)成[^,。!?;]{1,10}了(?=[,。!;]|$)",
        r"要不要[^,。!?;]*",
        r"(?:怎么|如何|怎样|能否|能不能|可不可以|可以|是否|我想|我)(?:\w{0,4})"
        r"(?:用|改用|换成|改成|改为|换用)[^,。!?;]*",
        r"(?:我|我们|他|她|他们|大家)先[^,。!?;]*[,。;]?(?:然后|再|接着)",
        r"(?:我|我们|是不是|是否)应该[^,。!?;]*",
    ),
    patterns=(
        r"(?:^|[,。!;])(?:请|就|这次)?用[^,。!?;]{1,10}(?:工具|计算器|搜索|接口|数据库"
        r"|文档)(?:来|去)?(?:算|查|搜|看|做|找|写)",
        r"(?:^|[,。!;])(?:请|你|以后|千万)?(?:别|不要|不用|不必|不许|禁止)(?:再|跟我"
        r"|给我|老是|总是|总)*(?:说|用|写|动|碰|删|改|打|加|给|编|猜|列|翻|省|跳|道|啰"
        r"|问)",
        r"(?:最多|至多|不超过|不多于|少于|控制在)[\d一二三四五六七八九十百两几]+(?:条"
        r"|个|句|字|行|点|段|词)",
        r"(?:^|[,。!;])(?:以后|今后|下次|下回)[^,。!?;我他她]{0,6}(?:只|不|都|要|别|用"
        r"|先|写|显示|讲|把|给)|这次(?:请)?(?:用|先|别|不要|只)",
        r"(?:^|[,。!;])(?:请|尽量)?(?:少|多)(?:用|说|写|讲|举)|说人话|(?:^"
        r"|[,。!;])叫我\w{1,4}(?:就行|就好|吧)?(?=[,。!;]|$)",
        r"(?:之前|以前)[,]?(?:请|你)?(?:要|得)?先(?:问|告诉|备份|确认|检查|说|通知)"
        r"|(?:都|统一|全部?)(?:写|改|用|换|标|翻译)成",
        r"(?:^|[,。!;])(?:请|麻烦|那就?|就)?(?:你)?只(?:(?:给|写|说|输出|回答|列|返回"
        r"|讲|显示|需要?给)(?!了|有)|要(?:代码|名字|结果|答案|结论|一个"
        r"|[^,。!?;]{1,6}就(?:行|好|可以)))",
        r"(?:^|[,。!;])(?:请|麻烦|以后)?(?:你)?(?:别|不要|不用|不必|禁止)再?(?:用|使用"
        r"|写|加|说|给|重复|输出|解释|道歉|啰嗦|列|编|猜|改|删|客套|寒暄|那么|太)",
        r"(?:^|[,。!;])(?:请|麻烦)?(?:你)?(?:用|以|按照?)[^,。!?;]{1,16}(?:回答|回复"
        r"|写|说|输出|解释|表示|说明|列出|来|讲)(?:一下|一遍)?(?=[,。!;]|$|我)",
        r"(?:写|说|答|讲|语气|口气|弄|做|改)得?[^,。!?;]{0,6}(?:一点|一些|点儿?|些)(?=[,。!;]|$)",
        r"(?:^|[,。!;])(?:从现在起|从现在开始|以后|今后|下次|下回|每次|接下来)(?:你|都"
        r"|请|就|的)*(?:要|不要|别|先|叫|用|记得|回答|回复|直接|给|写|必须|注明|说)",
        r"(?:^|[,。!;])(?:请|就)?直接(?:改|给|写|说|回答|输出|上代码|告诉)",
        r"(?:^|[,。!;])(?:请|再)?(?:把|将)[^,。!?;]{1,12}(?:去掉|删掉|删了|删除|放在"
        r"|放到|改成|改为|换成|加上|加粗|缩短|简化|控制在)",
        r"(?:^|[,。!;里中])(?:请|都|要|必须|再|记得)*(?:加上?|附上?|注明|标明|标注"
        r"|写明)(?:注释|出处|来源|例子|单位|日期|步骤|说明|链接)",
        r"(?:输出|整理|改写|写|做|转|排)成(?!本|绩|功|员)",
        r"(?:^|[,。!;])(?:请)?按(?:步骤|顺序|格式|要求|时间|重要性)",
        r"请(?:用|以|改|换|使用|按|只|不要|别|务必|始终|直接|尽量|先)",
        r"改用|换成|改成|改为|换用|而不是",
        r"用(?:中文|英文|英语|日语|法语|表格|列表|[a-z+#]{2,12})[^,。!?;]{0,6}"
        r"(?:回答|回复|写|说|输出|表示|实现)|^用(?:中文|英文|英语)(?=[,。!;]|$)",
        r"(?:^|[,。!;])(?:请|你应该|应该|你|要)?先[^,。!?;]{1,40}[,。;]?(?:然后|再|接着)",
        r"不要再?(?:用|使用|写|加|添加|说|给|出现|重复|输出|解释|超过|太)",
        r"(?:^|[,。!;])别再?(?:用|写|加|说|给|重复|输出|解释|太)",
        r"(?:以后|今后|下次|从现在开始|接下来)(?:请|都|要|不要|别|记得|回答|回复|直接)",
        r"应该(?:用|改|先|直接|使用)",
        r"(?:简短|简洁|简单|正式|口语化|礼貌|通俗|短|长)(?:一点|一些|点)",
        r"(?:控制在|不要?超过)[\d一二三四五六七八九十百千]+",
        r"(?:里|中|上|^|[,。!;])(?:请|都|千万|最好)?(?:别|不要|不能|不许|不准)再?(?:出现|带|含"
        r"|放|夹杂|混|留)"
        r"(?!走|来|孩子|我)" + _NOT_ASKED_ZH,
        r"(?:每|各)(?:一)?(?:条|个|项|段|步|句|行|点|章|处|题|节)[^,。!?;]{0,8}(?:附|加|标|写"
        r"|注明|列|配|给|举)"
        r"(?!了|吗|得)" + _NOT_ASKED_ZH + r"[^,。!?;]*$",
        r"先[^,。!?;]{1,12},[^,。!?;]{0,12}(?:再|之后|然后|才)(?:写|做|改|动|发|说|给|开始|继续"
        r"|回答)(?![^。!]*[吗?])",
        r"保留[\d一二两三四五六]+位|(?:精确|四舍五入)到",
        r"(?:^|[,。!;])(?:请|你|麻烦|记得)*先?(?:查|搜|看|读|问|算|核对|检查|确认|跑|对照"
        r"|翻)(?:一下|一遍|过|完"
        r"|好|清楚)?[^,。!?;]{0,10}[,]?(?:再|之后再?|以后再|后再?|才)(?:回答|回复|写|说|改|答"
        r"|给|下结论|动手|告诉)",
        r"(?:^|[,。!;])(?:以后|今后|下次)?(?:请)?(?:就)?称呼我",
        r"[\d一二两三四五六七八九十百]+(?:个字|字|句话?|行|段话?|条)(?:以内|之内|以下|就够|就行"
        r"|就好|为限)",
        r"(?:变量名?|函数名|注释|标题|名字|单位|日期|时间|金额|数字|人名|地名|术语|结论|重点"
        r"|称呼|语言|格式)"
        r"[^,。!?;我]{0,4}(?:都|一律|统一|全部?|请)?(?:用|写成|标成|加粗|换成|改成|放在?)(?!了"
        r"|过|得)" + _NOT_ASKED_ZH + r"[^,。!?;]*$",
        r"(?:^|[,。!;])(?:请|以后)?(?:不要|别)(?:一上来|动不动|总是?|老是?|每次|开头"
        r"|一开头)[^,。!?;]{0,6}",
        r"(?:^|[,。!;])(?:请|都)?(?:每|各)(?:一)?(?:条|个|项|段|步|句|行|点|章|处|题|节|次|页"
        r"|封)[^,。!?;我]{0,6}(?:空|分|换|用|只|都"
        r"|不|要|先|控制|以|从|按|放|问|说|讲)" + _NOT_ASKED_ZH,
        r"(?:价格|价钱|单位|日期|数字|时间|金额|温度|距离|长度|重量|人名"
        r"|地名)[^,。!?;我]{0,4}(?:换算成|换成|写成|改成|标|精确|保留"
        r"|用|按|都|统一)(?!了|过)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请|都|在)?(?:结尾|开头|末尾|最后|文末|标题|前面|后面|中间|段首|句末"
        r"|文章?里|代码里|表格里?|回复里?|答案里?|邮件里?)"
        r"[^,。!?;我]{0,4}(?:加|写|放|附|注|空|用|别|标|带|不要|只|统一|一律|要)(?!了|过|的)"
        + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])[^,。!?;我]{0,6}(?:之前|以前|前)[,]?(?:请|你|都)?(?:先|必须|要|得|务必|一定)"
        + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请|就)?(?:只|单)(?:挑|说|讲|给|列|写|用|答|保留|输出|回答|显示|提"
        r"|看)(?!了|过|有|能|是)" + _NOT_ASKED_ZH,
        r"(?:写|加|带|附|标|注|配|补|列|给)(?:上|出|明|清楚?)[^,。!?;]{0,6}"
        + _FORM_ZH
        + _NOT_ASKED_ZH,
        r"把?[^,。!?;我]{0,4}"
        + _FORM_ZH
        + r"(?:也|都|全|一并)?(?:写|列|给|说|展示|附|标|带|放|加)(?:出来|上|清楚|明白|进去|在)"
        + _NOT_ASKED_ZH,
        r"(?:语气|口吻|风格|措辞|用词|态度)[^,。!?;]{0,4}(?:再|更|要|别|点|些|像|换)"
        + _NOT_ASKED_ZH,
        r"(?:口语|书面|正式|客气|委婉|直白|活泼|严肃|轻松|专业|简短|详细|具体|短"
        r"|长)(?:化)?(?:一点儿?|点儿?|一些|些)(?=[,。!;]|$)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请|你)?(?:尽量|务必|一律|统统|全部|全文|始终|千万|一定|统一|都)(?:都"
        r"|要|请)?(?:用|写|别|不要|保持|按|以|标|放|改"
        r"|换|说|少|多|注明|翻译成|避免)" + _NOT_ASKED_ZH,
        r"(?:一律|统一|全都)(?:用|写|放|标|改|按|换|加)",
        r"(?:^|[,。!;])(?:请|你)?一次(?:只|最多)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:遇到|碰到|如果|要是|万一)?(?:不确定|不知道|没把握|拿不准|不清楚"
        r"|查不到|不懂|不会)的?[^,。!?;我]{0,6}[,]?(?:就|请"
        r"|要)?(?:说|标|问|注明|告诉|写|直说|空着|留空)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请|你)?(?:别|不要|不许)(?:瞎|乱|随便|擅自|老|总|动|自己|再)[^,。!?;]{0,6}"
        + _NOT_ASKED_ZH,
        r"(?:保持|保留|沿用|维持)(?:原|我|它|现在)[^,。!?;]{0,8}" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请)?按[^,。!?;我]{1,8}(?:排序|排列|排|分组|分类|归类|列|分)(?=[,。!;]"
        r"|$|一下|好|出来)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请)?分(?:点|条|段|步|行|项|栏|几点|步骤)(?:地)?(?:来)?(?:回答|说|写"
        r"|列|讲|回复|答|解释)",
        r"(?:给我|说|写|要|看|列|讲)[^,。!?;]{1,8}(?:就行|就好|就可以|就够)[,。]?[^?]*$",
        r"(?:解释|说明|客套话?|开场白|铺垫|废话|寒暄|道歉)(?:就|都|可以|全)?(?:省|免|略|跳过"
        r"|不用|不要|去掉|少)",
        r"(?:要|得|必须|请|记得)(?:写|注|标)(?:明|清|上|出)",
        r"(?:跟|和|与|照|按照?|仿照|参照|参考)[^,。!?;]{1,10}(?:保持)?(?:一致|一样|统一"
        r"|的(?:格式|写法|风格|样式))(?=[,。!;]|$)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请|你)?先(?:给|说|写|讲|列|报|亮|摆)(?:我"
        r"|出)?[^,。!?;]{0,10}(?=[,。!;]|$)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?!我|他|她|你)[^,。!?;我他她]{1,8}(?:放到|放在|放进|写到|写进|写在|移到"
        r"|挪到|单独(?:放|列|写))[^,。!?;]{1,8}"
        r"(?=[,。!;]|$)(?<!了)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请|要|得)?(?:写|说|讲|标|交代|注|解释)(?:清楚?|明白?|清)(?!了)",
        r"^(?:请|就|再|可以)?(?:少|多)(?!少|久|大|亏|数|余|半|了|的|个|谢|吃|喝|穿|休"
        r"|睡)[^,。!?;]{1,5}(?:点|些)?(?=[,。!;]|$)" + _NOT_ASKED_ZH,
        r"的(?:词|地方|内容|部分|句子|名字|术语|数字|步骤|段落)(?:就|请|都|要)?(?:保留|标|留"
        r"|不用|别|加|写|用|省|跳|空|注|放)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:就|请|你)?(?:当|把我当|假设|假定)(?:成|作|做)?我?[^,。!?;]{1,12}(?:来"
        r"|去|这样)?(?:讲|说|解释|写|回答|看待|就行|就好)",
        r"(?:^|[,。!;])(?:请|你|以后)?(?:别|不要)(?!吧|啊|了|这样)[^,。!?;我]{0,2}(?:把|在|用"
        r"|对|给|跟|为|每)[^,。!?;]{1,14}(?=[,。!;]|$)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请)?(?:用|拿)[^,。!?;]{1,12}(?:打个?比方|举例|比喻|作比较|表示|展示|排版)"
        + _NOT_ASKED_ZH,
        r"像[^,。!?;]{1,10}(?:那样|一样|似的)(?:说|聊|写|讲|回答)?(?=[,。!;]|$)" + _NOT_ASKED_ZH,
        r"(?:^|[,。!;])(?:请|就|全部|全文|都|以后|尽量)*用(?:繁体|简体|大白话|白话|人话|文言"
        r"|敬语|第[一二三]人称|书面语|口语|粗体|斜体|全角"
        r"|半角|阿拉伯数字|汉字|公制|美元|人民币|[二两三四五六]种)",
    ),
)

DETAILS_EN = RuleSet(
    Signal.DETAILS,
    "en",
    masks=(r"\b(?:no|without|less|fewer)(?: \w+)? (?:details?|examples?)\b",),
    patterns=(
        r"\b(?:can|could|would) you (?:please )?(?:explain|elaborate|expand|clarify|go deeper)\b",
        r"\btell me more\b|\bmore details?\b|\belaborate\b|\bin more (?:depth|detail)\b",
        r"\bwhat (?:do|did) you mean\b|\b(?:give me|show me|have) an example\b",
    ),
)

DETAILS_ZH = RuleSet(
    Signal.DETAILS,
    "zh",
    masks=(r"(?:不用|不必|不要|无需|别)[^,。!?;]{0,4}(?:详细|具体|展开|举例)",),
    patterns=(
        r"详细(?:说|讲|解释|介绍|一点|一些|点)|具体(?:说|讲|解释|一点|一些|怎么|点)",
        r"展开(?:说|讲|一下)|举个?例|进一步(?:说|讲|解释)|多(?:说|讲)(?:一点|一些|点)",
        r"(?:是)?什么意思",
    ),
)

RULE_SETS: tuple[RuleSet, ...] = (
    CORRECTION_EN,
    CORRECTION_ZH,
    CONFIRMATION_EN,
    CONFIRMATION_ZH,
    DIRECTIVE_EN,
    DIRECTIVE_ZH,
    DETAILS_EN,
    DETAILS_ZH,
)

TOOL_MASKS = re.compile(
    r"\b(?:0|no|zero|without(?: any)?) (?:\w+ )?(?:errors?|failures?|exceptions?|failed)\b"
    r"|\b(?:errors?|failures?|failed)[\"']?\s*[:=]\s*(?:0\b|null\b|none\b|false\b|\[\]"
    r"|\{\}|[\"']{2})"
    r"|(?:没有|无|0 ?个|零)(?:任何)?(?:错误|异常|失败|报错)|(?:错误|失败"
    r"|异常)[:]? ?0 ?(?:个|项|次|条|$)",
    re.IGNORECASE | re.MULTILINE,
)

TOOL_ERRORS = re.compile(
    r"^Traceback \(most recent call last\)|^[^\S\n]*(?:\w+\.)*\w*(?:Error|Exception)\b: "
    r"|^(?:fatal|fatal error|panic|error|ERROR|Error)(?:\[\w+\])?: "
    r"|^[^\s:]+[:(]\d+(?:[:,]\d+)?\)?: (?:fatal )?error\b"
    r"|^npm ERR!|^Exception in thread |^Segmentation fault|^FAILED |^make: \*\*\*"
    r"|^(?:[\w./-]+: )+(?:error: |command not found|cannot |[\w ]*No such file|Permission denied)"
    r"|^(?:HTTP(?:/[\d.]+)?|status(?: code)?:?) ?[45]\d\d\b|^Permission denied|^Access denied"
    r"|\bexit(?:ed)?(?: with)? (?:code|status):? (?!0\b)-?\d+|\b[1-9]\d* failed\b"
    r"|^[^.\n]{0,60}\b(?:timed out|connection (?:refused|reset))\b"
    r"|^E +\w|^curl: \(\d+\)|\b(?:FAILED|FAILURE)\b|\bsyntax error\b|\b[1-9]\d* errors?\b"
    r"|[\"'](?:status|code)[\"']\s*:\s*[\"']?[45]\d\d\b"
    r"|^(?:找不到|无法|不能|拒绝|未授权|未找到|缺少|参数错误)|(?:网络|服务|系统|连接"
    r"|运行)[^\n,。]{0,3}(?:异常|错误|中断)"
    r"|[\"']error[\"']\s*:\s*(?:[\"'{\[]|true)|[\"'](?:ok|success)[\"']\s*:\s*false"
    r"|^(?:错误|异常|报错)[:：]|^[^\n,。]{0,12}(?:失败|出错|不存在|超时|权限不足"
    r"|无法\w+)(?:[,:，：。!！]|$)"
    r"|^[^\n,。]{0,6}权限不足|返回 ?[45]\d\d|退出码:? ?(?!0\b)\d+|[\"'](?:失败|错误)[\"']",
    re.MULTILINE,
)

__all__ = ["QUOTED", "RULE_SETS", "TOOL_ERRORS", "TOOL_MASKS", "RuleSet", "Signal"]
